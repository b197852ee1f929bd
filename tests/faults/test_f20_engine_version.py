"""F20: another engine whose version nobody read (unknown, a nightly, older, newer): nothing of it is guessed."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

CAUGHT = [("F20", "plan", "SGLang 0.5.14+patched is a local build, no release; what it does is not guessed")]
SGLANG = {"engine": "sglang"}


def planned(tmp_path: Path, left_over: ModuleType, version: str | None) -> ModuleType:
    server = SGLANG if version is None else {**SGLANG, "engine_version": version}
    return left_over.World(tmp_path, {"server": server})


@pytest.mark.parametrize("version", ["0.5.9", "0.5.14", "v0.5.23", "0.5.16", "0.5.13"])
def test_a_release_passes(tmp_path: Path, left_over: ModuleType, version: str) -> None:
    assert [f for f in planned(tmp_path, left_over, version).plan().findings if f.fault == "F20"] == []


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "server.engine_version = null (default): the version of SGLang is not known"),
        ("nightly", "SGLang nightly is a nightly build, no release"),
        ("0.5.10.dev20260301+gabc1234", "SGLang 0.5.10.dev20260301+gabc1234 is a development build, no release"),
        ("0.5.14+patched", "SGLang 0.5.14+patched is a local build, no release"),  # the incident's: patched by hand
        ("9f2c1d4", "SGLang 9f2c1d4 is a commit, no release"),
        ("0.5.24", "SGLang 0.5.24 is newer than every release whose source was read"),
        ("0.4.1", "SGLang 0.4.1 is older than every release whose source was read"),
    ],
)
def test_caught_at_plan(tmp_path: Path, left_over: ModuleType, version: str | None, words: str) -> None:
    world = planned(tmp_path, left_over, version)
    (error,) = [f for f in world.plan().errors if f.check == "F20"]
    assert error.fault == "F20"
    assert words in error.found
    assert "is not guessed" in error.expected
    assert "0.5.14" in error.ways[0]
    assert "slipstream fingerprint" in error.ways[1]


@pytest.mark.parametrize("version", [None, "nightly", "0.5.24"])
def test_the_fault_passes_with_the_check_off(tmp_path: Path, left_over: ModuleType, version: str | None) -> None:
    findings = planned(tmp_path, left_over, version).plan(skip=("F20",)).findings
    assert [f for f in findings if f.fault == "F20"] == []


def test_a_release_between_two_that_differ(tmp_path: Path, left_over: ModuleType) -> None:
    """What 0.5.13 makes of the ids of a DeepSeek target is not known; of a Llama's it is."""
    world = planned(tmp_path, left_over, "0.5.13")
    shutil.copytree(world.draft((2, 16, 29)), tmp_path / "draft")
    world.write({"draft": {"path": str(tmp_path / "draft")}})
    assert [f for f in world.plan().findings if f.fault == "F20"] == []
    config = json.loads((world.target / "config.json").read_text())
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (world.target / "config.json").write_text(json.dumps(config))
    (error,) = [f for f in world.plan().errors if f.check == "F20"]
    assert "changed between SGLang 0.5.12.post1 and 0.5.13.post1, and 0.5.13 lies between" in error.found


def test_our_own_engine_needs_no_version(tmp_path: Path, left_over: ModuleType) -> None:
    assert left_over.World(tmp_path).words() == []
