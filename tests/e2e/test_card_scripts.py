"""Scripts of tests/benchmarks for a card, tiny and on the CPU: that they run, and that what they prove can fail."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def wiring(load_test_module):
    return load_test_module(BENCHMARKS / "wiring_card.py")


@pytest.fixture(scope="module")
def pieces(load_test_module):
    return load_test_module(BENCHMARKS / "draft_pieces.py")


def test_a_draft_comes_back_from_its_pieces(pieces, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20_000)
    target, draft = str(tiny_models.target), str(tiny_models.draft)
    assert pieces.main(["pack", draft, str(tmp_path / "pieces")]) == 0
    found = sorted((tmp_path / "pieces").iterdir())
    assert len(found) > 1
    assert all(path.stat().st_size <= 20_000 for path in found)
    assert pieces.main(["join", str(tmp_path / "pieces"), str(tmp_path / "draft"), "--target", target]) == 0
    ours, theirs = (load_file(Path(d) / "model.safetensors") for d in (tmp_path / "draft", draft))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("config.json", "slipstream.json"):
        assert json.loads((tmp_path / "draft" / name).read_text()) == json.loads((Path(draft) / name).read_text())


def test_a_draft_is_adopted_by_the_target_at_hand(pieces, tiny_models, tmp_path):
    changed = json.loads((tiny_models.draft / "slipstream.json").read_text())
    changed["identity"]["target"] = "0" * 64
    for path in tiny_models.draft.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "slipstream.json").write_text(json.dumps(changed))
    assert pieces.main(["adopt", str(tmp_path), str(tmp_path / "own"), "--target", str(tiny_models.target)]) == 0
    own = json.loads((tmp_path / "own" / "slipstream.json").read_text())
    assert own["identity"] == json.loads((tiny_models.draft / "slipstream.json").read_text())["identity"]


def test_a_draft_that_is_not_there_is_named(pieces, tiny_models, tmp_path):
    arguments = ["adopt", str(tmp_path / "none"), str(tmp_path / "own"), "--target", str(tiny_models.target)]
    with pytest.raises(SystemExit, match="no draft in "):
        pieces.main(arguments)
    assert not (tmp_path / "own").exists()


def test_wiring_is_counted(wiring, tiny_models, capsys):
    arguments = ["--target", str(tiny_models.target), "--draft", str(tiny_models.draft), "--tokens", "10"]
    assert wiring.main([*arguments, "--num-steps", "2", "--device", "cpu"]) == 0
    assert "5 of 5 as they must be" in capsys.readouterr().out


def test_a_difference_that_must_not_be_is_a_failure(wiring, tiny_models, capsys, monkeypatch):
    """A fault that nobody named, in every run with graphs."""
    run = wiring.Subject.run
    monkeypatch.setattr(
        wiring.Subject, "run", lambda self, graphs, faults=(): run(self, graphs, faults or (["F6:slot=1"] * graphs))
    )
    arguments = ["--target", str(tiny_models.target), "--draft", str(tiny_models.draft), "--tokens", "10"]
    assert wiring.main([*arguments, "--num-steps", "2", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out
