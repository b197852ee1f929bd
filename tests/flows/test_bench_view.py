"""The tables of `bench engine` and `bench kernels`, from figures that are known."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream.engine.bench.cases import Case, Outcome
from slipstream.engine.bench.generate import Parts, Timing
from slipstream.engine.bench.kernels import Measured
from slipstream.engine.bench.parts import KernelTime, RoundParts
from slipstream.engine.errors import SlipstreamError
from slipstream.flows import bench_view


def outcome(batch: int, ms: float, goal: float | None, parts: RoundParts | None = None) -> Outcome:
    timing = Timing(batch, 3, ms, 0.03, 65, 256 * batch, Parts(0.21, 0.37, 0.02, 0.09))
    return Outcome(Case("smollm2-round", "smollm2", batch, 3, goal), timing, 0.455e9, 4.55e12, parts)


def shown(*renderables: object) -> str:
    out = Console(file=io.StringIO(), width=200)
    for one in renderables:
        out.print(one)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def cells(text: str, start: str) -> list[str]:
    """Cells of the one row that begins with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {start}")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_cases_tell_time_floor_goal_and_whether_it_is_reached() -> None:
    text = shown(bench_view.case_table([outcome(1, 0.5, 0.6)]))
    assert cells(text, "smollm2-round") == [
        "smollm2-round", "1", "3", "0.500", "3.0%", "7,877", "0.100", "20%", "0.60", "yes",
    ]  # fmt: skip
    assert cells(shown(bench_view.case_table([outcome(1, 0.7, 0.6)])), "smollm2")[-2:] == ["0.60", "no"]
    assert cells(shown(bench_view.case_table([outcome(4, 0.7, None)])), "smollm2")[-2:] == ["", ""]
    assert cells(shown(bench_view.parts_table([outcome(1, 0.7, None)])), "smollm2")[3:] == [
        "0.210", "0.370", "0.020", "0.090",
    ]  # fmt: skip


def test_a_profile_sums_what_it_does_not_show() -> None:
    kernels = [KernelTime(f"kernel_{i}", 2.0, 40.0 - i) for i in range(20)]
    text = shown(bench_view.profile_table(outcome(1, 1.0, None).case, RoundParts(kernels, 500.0, 520.0)))
    assert "520 us a round, of it 500 in kernels (overlap once), 20 in gaps" in " ".join(text.split())
    assert cells(text, "kernel_0")[1:] == ["40.0", "2.0", "20.00"]
    assert cells(text, "4 others")[1:] == [f"{24.0 + 23 + 22 + 21:.1f}", "8.0", "11.25"]


def test_kernels_tell_rates() -> None:
    text = shown(bench_view.kernel_table("X", [Measured("norm_linear 10 x 10", 4, 2.0, 4_550_000, 0.5, 0.0021)]))
    assert cells(text, "norm_linear")[1:] == ["4", "2.00", "4.55", "2.27", "50%", "2.1e-03"]


def test_each_case_is_recorded_as_soon_as_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "h200.json"

    def cases(*_: object, **__: object) -> Iterator[Outcome]:
        yield outcome(1, 0.5, 0.6)
        assert [row["value"] for row in json.loads(record.read_text())] == [0.5]
        yield outcome(4, 0.9, None, RoundParts([], 1.0, 2.0))

    monkeypatch.setattr(bench_view, "run_cases", cases)
    out = Console(file=io.StringIO(), width=200)
    bench_view.bench_engine([], 4.55e12, record, True, "slipstream bench engine", out)
    assert [(row["batch"], row["goal"]) for row in json.loads(record.read_text())] == [(1, 0.6), (4, None)]


def test_wrong_words_are_told() -> None:
    with pytest.raises(SlipstreamError, match="--sizes names gpt2"):
        bench_view.bench("engine", "smollm2,gpt2", None, False, "")
    if not torch.cuda.is_available():
        with pytest.raises(SlipstreamError, match="sees no card"):
            bench_view.bench("kernels", None, None, False, "")
