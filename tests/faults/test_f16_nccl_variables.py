"""F16: an NCCL variable misspelt (NCCL ignores it) or out of range (NCCL stops, or takes another value)."""

from pathlib import Path
from types import ModuleType

import pytest

from slipstream.configs.load import DeploymentError
from slipstream.flows.plan import Plan, plan_command

CAUGHT = [
    ("F16", "plan, import", "the variable or value by name, and the nearest one that NCCL takes"),
]

SERVER = "python3 -m sglang.launch_server --model-path /models/target --tp-size 8"
INCIDENT = (
    "NCCL_PROTO=LL NCCL_ALGO=Ring NCCL_P2P_LEVEL=SYS NCCL_MAX_NCHANNELS=16 NCCL_BUFFSIZE=16777216 NCCL_NTHREADS=512"
)


def plan(variables: str, tmp_path: Path, skip: tuple[str, ...] = ()) -> Plan:
    line = f"{variables} {SERVER}"
    return plan_command(line, "0.5.14", (f"host.workdir={tmp_path}",), environ={}, skip=skip)


def errors(variables: str, tmp_path: Path, skip: tuple[str, ...] = ()) -> list[str]:
    return [str(finding) for finding in plan(variables, tmp_path, skip).errors if finding.fault == "F16"]


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [
        ("NCCL_PROTOCOL=LL", "NCCL_PROTO"),
        ("NCCL_ALGOS=Ring", "NCCL_ALGO"),
        ("NCCL_MAX_NCHANNEL=16", "NCCL_MAX_NCHANNELS"),
        ("NCCL_BUFFERSIZE=4194304", "NCCL_BUFFSIZE"),
        ("NCCL_NTHREAD=512", "NCCL_NTHREADS"),
        ("NCCL_P2P_LVL=SYS", "NCCL_P2P_LEVEL"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_one(tmp_path: Path, misspelt: str, nearest: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        plan(misspelt, tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.fault == "F16"
    assert misspelt.partition("=")[0] in caught.value.found
    assert caught.value.expected == f"the nearest known one is {nearest}"
    assert caught.value.runbook == "wrong-flags.md"


@pytest.mark.parametrize(
    ("variable", "expected", "way"),
    [
        ("NCCL_PROTO=LLL", "LL, LL128, Simple", "write nccl.proto: LL (NCCL_PROTO=LL)"),
        ("NCCL_PROTO=LL,Simpel", "LL, LL128, Simple", "write nccl.proto: LL,Simple"),
        ("NCCL_ALGO=Rings", "Ring, Tree", "write nccl.algo: Ring (NCCL_ALGO=Ring)"),
        ("NCCL_ALGO=allreduced:ring", "allreduce before the colon", "write nccl.algo: allreduce:ring"),
        ("NCCL_P2P_LEVEL=SYSTEM", "LOC, NVL, PIX, PXB, PHB, SYS", "write nccl.p2p_level: SYS"),
        ("NCCL_P2P_LEVEL=7", "LOC, NVL, PIX, PXB, PHB, SYS", "leave nccl.p2p_level out"),
        ("NCCL_MAX_NCHANNELS=0", "1 to 64", "write nccl.max_nchannels: 1"),
        ("NCCL_MAX_NCHANNELS=160", "1 to 64", "write nccl.max_nchannels: 64"),
        ("NCCL_MIN_NCHANNELS=32 NCCL_MAX_NCHANNELS=16", "no more channels", "leave nccl.min_nchannels out"),
        ("NCCL_NTHREADS=500", "becomes the largest, without a word", "write nccl.nthreads: 512"),
        ("NCCL_NTHREADS=96", "one of 64, 128, 256, 512", "write nccl.nthreads: "),
        ("NCCL_BUFFSIZE=0", "a positive number of bytes", "write nccl.buffsize_bytes: 4194304"),
        ("NCCL_NVLS_ENABLE=3", "0 to 2", "write nccl.nvls_enable: 2"),
        ("NCCL_IB_DISABLE=2", "0 to 1", "write nccl.ib_disable: 1"),
        ("NCCL_DEBUG=LOUD", "VERSION, WARN, INFO", "leave nccl.debug out"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_nearest_one(
    tmp_path: Path, variable: str, expected: str, way: str
) -> None:
    (error,) = errors(variable, tmp_path)
    assert error.startswith("F16: nccl.")
    assert f"({variable.split('=')[0]} (command))" in error
    assert expected in error
    assert way in error
    assert "runbooks/wrong-flags.md" in error


def test_a_word_where_a_number_belongs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="NCCL_NTHREADS many") as caught:
        plan("NCCL_NTHREADS=many", tmp_path)
    assert caught.value.fault == "F16"
    assert "a whole number" in caught.value.expected


@pytest.mark.parametrize(
    "variables",
    [
        INCIDENT,
        "",
        "NCCL_ALGO=Ring,Tree",
        "NCCL_ALGO=^NVLS",
        "NCCL_ALGO=ring",
        "NCCL_ALGO='allreduce:ring;broadcast:tree'",
        "NCCL_PROTO=^LL128",
        "NCCL_P2P_LEVEL=4",
        "NCCL_NTHREADS=64",
        "NCCL_MAX_NCHANNELS=64",
        "NCCL_MAX_CTAS=1",
        "NCCL_DEBUG=INFO",
    ],
)
def test_what_nccl_takes_passes(tmp_path: Path, variables: str) -> None:
    assert errors(variables, tmp_path) == []


def test_variables_of_the_incident_are_taken_and_told_as_unmeasured(tmp_path: Path) -> None:
    told = [effect for effect in plan(INCIDENT, tmp_path).effects if effect.row == "nccl"]
    assert {effect.severity for effect in told} == {"warning"}
    assert all(name.partition("=")[0] in told[0].asked for name in INCIDENT.split())
    assert "experiments" in told[0].effective
    assert "buffer of protocol Simple, and LL is the only one allowed" in told[1].effective
    assert [effect for effect in plan("", tmp_path).effects if effect.row == "nccl"] == []


def test_a_file_is_checked_as_a_line_is(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"engine": "sglang"}, "nccl": {"nthreads": 500}})
    (error,) = [finding for finding in world.plan().errors if finding.fault == "F16"]
    assert f"nccl.nthreads = 500 ({world.line('nccl.nthreads')})" in error.found
    world.write({"nccl": {"nthreds": 512}})
    with pytest.raises(DeploymentError, match=r"nccl\.nthreds is not a known key") as caught:
        world.plan()
    assert "nccl.nthreads" in caught.value.expected


def test_the_fault_passes_with_the_check_off(tmp_path: Path) -> None:
    assert errors("NCCL_NTHREADS=500", tmp_path)
    assert errors("NCCL_NTHREADS=500", tmp_path, skip=("F16",)) == []
