"""The byte floor of a step against figures worked out apart (a worksheet of Kimi-K2.5 at TP = 8), and best K."""

from pathlib import Path

import pytest

from slipstream.flows.plan import Plan, derived_values, make_plan
from slipstream.tasks.byte_floor import Floor, best_at_floor, floors, step_bytes

CONFIGS = Path(__file__).parents[2] / "configs"


def plan(name: str, tmp_path: Path, *overrides: str) -> Plan:
    return make_plan(CONFIGS / f"{name}.yaml", overrides, workdir=tmp_path, environ={}, stages=())


@pytest.mark.parametrize(
    ("rows", "gigabytes"), [(1, 6.03), (2, 7.48), (4, 10.30), (8, 15.60), (16, 24.95), (64, 57.34)]
)
def test_bytes_of_a_step(tmp_path: Path, rows: int, gigabytes: float) -> None:
    target = plan("kimi-k2.5-8xh200", tmp_path).facts.target
    assert target is not None
    assert step_bytes(target, 8, rows, "bfloat16") / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_rounds_of_the_shipped_files(tmp_path: Path) -> None:
    found = floors(plan("kimi-k2.5-8xh200", tmp_path).facts)
    assert [floor.num_steps for floor in found] == [0, 1, 2, 3]
    assert found[0].round_ms == pytest.approx(1.40, rel=0.01)
    assert found[3].round_ms > 10.30 / 4.3
    rtx = plan("kimi-k2.5-8xrtxpro6000", tmp_path)
    assert floors(rtx.facts)[0].round_ms == pytest.approx(6.03 / 1.79, rel=0.01)  # 11.1 ms in the incident
    names = [row.name for row in derived_values(rtx)]
    assert names.count("best K at the floor") == 4
    assert "byte floor, K = 2" in names
    assert floors(plan("kimi-k2.5-8xh200", tmp_path, "host.gpu_bandwidth_tb=null").facts) == ()


def test_best_k() -> None:
    found = tuple(Floor(k, 0, 1.0, 0.4 * k) for k in range(5))
    best, length = best_at_floor(found, 1.0 + 0.5 + 0.25 + 0.125, 3)  # half of the drafts accepted, each time
    assert best.num_steps == 1  # 1.5 / 1.4, against 1 / 1 and 1.75 / 1.8
    assert length == pytest.approx(1.5)
    assert best_at_floor(found, 4.0, 3)[0].num_steps == 4  # all accepted: 5 / 2.6
    assert best_at_floor(found, 1.0, 3)[0].num_steps == 0
