"""F14: a draft with fewer positions than the served context. Beyond its rope table an engine reads garbage."""

from pathlib import Path
from types import ModuleType

import pytest

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.errors import SlipstreamError

CAUGHT = [
    ("F14", "plan, load", "the draft's positions and the served context, both numbers"),
]


def test_plan_names_both_numbers(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"draft": {"max_context_tokens": 512}, "server": {"max_context_tokens": 1024}})
    (error,) = world.plan().errors
    assert error.fault == "F14"
    assert f"draft.max_context_tokens = 512 ({world.line('draft.max_context_tokens')})" in error.found
    assert f"server.max_context_tokens = 1024 ({world.line('server.max_context_tokens')})" in error.found
    assert "write draft.max_context_tokens: 1024" in error.ways
    assert "write server.max_context_tokens: 512" in error.ways


def test_a_finished_draft_that_is_too_short(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"max_context_tokens": 2048}})
    draft = world.draft((2, 16, 29), max_position=1024)
    (error,) = world.plan().errors
    assert error.fault == "F14"
    assert str(draft) in error.found
    assert "1024 positions" in error.found
    assert "2048" in error.found


@pytest.mark.parametrize("draft", [1024, 4096])
def test_long_enough_passes(tmp_path: Path, left_over: ModuleType, draft: int) -> None:
    world = left_over.World(tmp_path, {"draft": {"max_context_tokens": draft}, "server": {"max_context_tokens": 1024}})
    world.draft((2, 16, 29), max_position=draft)
    assert world.words() == []


def test_convert_refuses_it_too(tmp_path: Path, tiny: ModuleType) -> None:
    draft, record = short_draft(tmp_path, tiny)
    with pytest.raises(SlipstreamError, match=r"F14: .* 256, .* 512"):
        save_draft(tmp_path / "draft", draft, record, served_tokens=512)
    assert not (tmp_path / "draft").exists()


def test_the_fault_passes_with_the_checks_off(tmp_path: Path, left_over: ModuleType, tiny: ModuleType) -> None:
    world = left_over.World(tmp_path, {"draft": {"max_context_tokens": 512}, "server": {"max_context_tokens": 1024}})
    world.draft((2, 16, 29), max_position=512)
    assert world.words(skip=("F14",)) == []
    draft, record = short_draft(tmp_path, tiny)
    save_draft(tmp_path / "draft", draft, record, served_tokens=512, skip=("F14",))
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def short_draft(root: Path, tiny: ModuleType) -> tuple:
    """A random draft with the 256 positions of its target, and its record."""
    from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
    from slipstream.engine.drafts.eagle3.layer_ids import Family
    from slipstream.engine.handover import TargetIdentity

    target = tiny.tiny_target(root / "tiny")
    record = DraftRecord(TargetIdentity.from_dir(root / "tiny"), Family.LLAMA, "0" * 64)
    return tiny.tiny_draft(target), record
