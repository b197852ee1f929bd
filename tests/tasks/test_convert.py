"""Stage convert, on a tiny draft: nothing is lost on the way, and what other engines need is there."""

import json

import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.hf_config import read_record
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.training.checkpoint import load_network
from slipstream.tasks import convert
from slipstream.tasks.stage import run_stage


def test_every_bit_of_the_trained_draft_arrives(finished):
    _, results, _ = finished
    trained = load_network(results["train"].dir / "checkpoint", torch.float32)
    loaded = load_draft(results["convert"].dir / "draft")
    ours, theirs = trained.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.config == trained.config


def test_figures(finished):
    made, results, listeners = finished
    figures = results["convert"].figures
    draft = results["convert"].dir / "draft"
    assert figures["draft_dir"] == str(draft)
    assert figures["slots"] == ["slot_1", "slot_2", "slot_3"]
    assert figures["engines"] == {"vllm 0.24.0": [1, 2, 3], "sglang 0.5.14": [0, 1, 2]}
    assert figures["bytes"] == sum(p.stat().st_size for p in draft.iterdir())
    assert (figures["dtype"], figures["draft_vocab_size"]) == ("float32", 120)
    assert figures["outside_vocabulary"] == {
        split: results["train"].figures["outside_vocabulary"][split] for split in ("train", "holdout")
    }
    assert any("cannot propose" in text for text in listeners["convert"].said)
    config = json.loads((draft / "config.json").read_text())
    assert config["max_position_embeddings"] >= made.deployment.server.max_context_tokens


def test_the_directory_says_where_the_draft_comes_from(finished):
    made, results, _ = finished
    draft = results["convert"].dir / "draft"
    record = read_record(draft)
    manifest = json.loads((results["train"].dir / "manifest.json").read_text())
    assert record.training_fingerprint == manifest["fingerprint"]
    identity = TargetIdentity.from_dir(made.model_dir)
    assert record.identity == identity
    made.check_before_launch((1, 2, 3))


def test_written_in_the_dtype_that_is_served(finished, pipeline, tmp_path):
    made, _, _ = finished
    served = pipeline.make_deployment(made.model_dir, server={"dtype": "bfloat16"})
    context = made.context(convert.STAGE, tmp_path, served)
    convert.run(context)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    trained = load_network(made.workdir / "train" / "checkpoint", torch.float32)
    assert torch.equal(tensors["fc.weight"], trained.fc.weight.bfloat16())
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_context_longer_than_the_drafts_positions_is_refused(finished, pipeline, tmp_path):
    made, _, _ = finished
    longer = pipeline.make_deployment(made.model_dir, server={"max_context_tokens": 129})
    with pytest.raises(SlipstreamError, match="positions end at 128, the server's context at 129") as caught:
        convert.run(made.context(convert.STAGE, tmp_path, longer))
    assert caught.value.fault == "F14"


def test_an_embedding_that_is_not_the_targets_is_refused(finished, pipeline, chats, tiny, tmp_path):
    """SGLang would replace it without a word; the draft was trained with another one."""
    made, _, _ = finished
    network = load_network(made.workdir / "train" / "checkpoint")
    embedding = network.embed_tokens.weight.detach().clone()
    convert.check_embedding(network, embedding)
    embedding[5, 3] += 1
    with pytest.raises(SlipstreamError, match=r"embedding .* is not the target's"):
        convert.check_embedding(network, embedding)


def test_a_tensor_that_comes_back_otherwise_is_named(finished):
    made, _, _ = finished
    written = load_network(made.workdir / "train" / "checkpoint")
    read = load_network(made.workdir / "train" / "checkpoint")
    convert.check_round_trip(written, read)
    with torch.no_grad():
        read.midlayer.mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SlipstreamError, match=r"midlayer\.mlp\.down_proj\.weight") as caught:
        convert.check_round_trip(written, read)
    assert caught.value.fault == "F8"


def test_an_engine_that_cannot_serve_the_draft_is_named(finished, pipeline, tmp_path):
    made, _, _ = finished
    network = load_network(made.workdir / "train" / "checkpoint")
    listener = pipeline.Listener()
    context = made.context(convert.STAGE, tmp_path / "out")
    context.reporter = listener
    network.config.__dict__["norm_before_residual"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "load_network", lambda *args: network)
        figures = convert.run(context)
    assert figures["engines"]["sglang 0.5.14"] == "sglang 0.5.14 has no norm_before_residual"
    assert any("sglang 0.5.14 cannot serve this draft" in text for text in listener.warned)


def test_a_second_run_is_skipped(finished):
    made, _, _ = finished
    assert run_stage(convert.STAGE, made.deployment, made.workdir).status == "skipped"
