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


ATTENTION = "{} skinny_0 _write_latent_kernel _head_linear_kernel _chunks _combine _head_linear_kernel {} "
KERNELS = {
    "few rows": ATTENTION.format("bulk_0", "bulk_2")
    + "_rms_norm_kernel route_rows bulk_1 skinny_1 experts_gate_up_1 experts_down_1 _all_reduce_kernel",
    "many rows": ATTENTION.format("order_1 wide_0", "order_1 wide_2")
    + "_rms_norm_kernel route_rows skinny_2 skinny_0 experts_gate_up_1 experts_down_1 _all_reduce_kernel",
    "ranks": ATTENTION.format("bulk_0", "bulk_2 _all_reduce_kernel")
    + "gate_rows choose_rows experts_stream _all_reduce_kernel",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_a_layer_are_found_by_their_names(load_test_module, name):
    """Every weight is read by one of them, none twice; an unknown kernel keeps its own name."""
    table = load_test_module(BENCHMARKS / "kimi_layer.py")
    kernels = KERNELS[name].split()
    spans = table.rounds_in(table.rehearsed(kernels, 5))[0]
    layers = table.layers_in([span[2] for span in spans])
    assert len(layers) == 5
    assert all([spans[place][2] for place in layer] == kernels for layer in layers)
    parts = table.parts_of(kernels)
    reads = sorted(one for _, read in parts for one in read)
    assert reads == sorted({"latents", "queries", "key_up", "value_up", "cache", "o"} | {
        "router", "shared_up", "shared_down", "experts_up", "experts_down"
    })  # fmt: skip
    assert [what for what, read in parts if read == ("latents",)] == ["q_a and kv_a"]
    assert table.parts_of(["bulk_0", "what_is_this"])[1] == ("what_is_this", ())
