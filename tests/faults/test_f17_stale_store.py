"""F17: target, tokenizer, template or conversations changed since extraction. Caught by the manifest's fingerprints.

`plan` sees it first (test_f17_plan.py); here the stages that would use what is stale.
"""

import json
import shutil

import pytest

from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.serving.engine_build import check_draft_fits
from slipstream.tasks import convert, extract, train
from slipstream.tasks.checks import Contradictions
from slipstream.tasks.stage import run_stage

CAUGHT = [
    ("F17", "training, load", "the draft differs from the target: weights or config; extract again"),
]


@pytest.fixture(scope="module")
def finished(pipeline, chats, tiny, tmp_path_factory):
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("f17"), chats, tiny)
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        run_stage(stage, made.deployment, made.workdir)
    return made


@pytest.fixture
def made(finished, pipeline, tmp_path):
    """A copy to spoil: `resolve`'s manifest names the copied target."""
    shutil.copytree(finished.workdir, tmp_path / "work")
    shutil.copytree(finished.model_dir, tmp_path / "target")
    manifest = tmp_path / "work" / "resolve" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["figures"]["model_dir"] = str(tmp_path / "target")
    manifest.write_text(json.dumps(value))
    return pipeline.Pipeline(tmp_path / "work", tmp_path / "target", finished.deployment, finished.records)


def change_target(made, tiny):
    """Weights of the same shapes, from another seed: nothing but a hash can tell."""
    config = json.loads((made.model_dir / "config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"], "eos_token_id": config["eos_token_id"], "bos_token_id": None}
    other = tiny.save_tiny(made.model_dir.parent / "other", 1, **sizes)
    shutil.copy(other / "model.safetensors", made.model_dir / "model.safetensors")
    return "target weights or config"


def change_tokenizer(made, tiny):
    path = made.model_dir / "tokenizer.json"
    value = json.loads(path.read_text())
    value["added_tokens"][0]["lstrip"] = not value["added_tokens"][0]["lstrip"]
    path.write_text(json.dumps(value))
    return "tokenizer"


def change_template(made, tiny):
    path = made.model_dir / "chat_template.jinja"
    path.write_text(path.read_text().replace("Be kind", "Be brief"))
    return "chat template"


CHANGES = [change_target, change_tokenizer, change_template]


@pytest.mark.parametrize("change", CHANGES)
def test_caught_before_training(made, tiny, tmp_path, change):
    word = change(made, tiny)
    with pytest.raises(SlipstreamError) as caught:
        train.run(made.context(train.STAGE, tmp_path / "out"))
    assert caught.value.fault == "F17"
    assert f": {word} " in caught.value.found
    assert "extract again" in caught.value.do
    old, new = caught.value.found.split()[-1], caught.value.expected.split(",")[0].split()[-1]
    assert old != new  # both values are named


@pytest.mark.parametrize("change", [change_tokenizer, change_template])
def test_unnoticed_by_training_without_the_check(made, tiny, tmp_path, change):
    change(made, tiny)
    assert train.run(made.context(train.STAGE, tmp_path / "out"), skip={"F17"})["steps"] > 0


def test_other_weights_pass_only_with_the_teacher_check_off_too(made, tiny, tmp_path):
    """F7 would see the other target's norm and head; F17 says what really happened, and before any computing."""
    change_target(made, tiny)
    with pytest.raises(SlipstreamError) as caught:
        train.run(made.context(train.STAGE, tmp_path / "a"), skip={"F17"})
    assert caught.value.fault == "F7"
    assert train.run(made.context(train.STAGE, tmp_path / "b"), skip={"F17", "F7"})["steps"] > 0


@pytest.mark.parametrize("change", CHANGES)
def test_an_extraction_does_not_go_on_with_another_target(made, tiny, tmp_path, change):
    shutil.copytree(made.workdir / "extract" / "store", tmp_path / "out" / "store")
    word = change(made, tiny)
    with pytest.raises(SlipstreamError, match=word) as caught:
        extract.run(made.context(extract.STAGE, tmp_path / "out"))
    assert caught.value.fault == "F17"
    assert "delete" in caught.value.do


@pytest.mark.parametrize("change", CHANGES)
def test_caught_before_launch(made, tiny, change):
    made.check_before_launch()
    word = change(made, tiny)
    with pytest.raises(Contradictions) as caught:
        made.check_before_launch()
    store, draft = caught.value.findings
    assert (store.fault, draft.fault) == ("F17", "F17")
    assert f"since the hidden-state store {made.workdir / 'extract' / 'store'} was made" in store.found
    assert f"since the draft {made.workdir / 'convert' / 'draft'} was made, its target changed: {word}: " in draft.found
    old, new = draft.found.split("was ")[-1].split(", is ")
    assert old != new  # both values are named
    made.check_before_launch(skip={"F17"})


@pytest.mark.parametrize("change", CHANGES)
def test_the_server_itself_refuses(made, tiny, change):
    """Started by hand, with nothing around it that has seen the store."""
    draft = made.workdir / "convert" / "draft"
    word = change(made, tiny)
    target = load_target(made.model_dir, "float32")
    network, identity = load_draft(draft), TargetIdentity.from_dir(made.model_dir)
    with pytest.raises(SlipstreamError, match=f"the draft {draft} differs from the target: {word} ") as caught:
        check_draft_fits(draft, network, target, identity)
    assert caught.value.fault == "F17"
    check_draft_fits(draft, network, target, identity, skip={"F17"})


def test_other_answers_under_the_same_ids(made, tmp_path):
    path = made.workdir / "regenerate" / "conversations.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    record["token_ids"][-2] += 1
    lines[2] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SlipstreamError, match=r"conversation chat-2 in .* holds other tokens") as caught:
        train.run(made.context(train.STAGE, tmp_path / "out"))
    assert caught.value.fault == "F17"
    train.run(made.context(train.STAGE, tmp_path / "unchecked"), skip={"F17"})
    with pytest.raises(SlipstreamError, match="regenerate is damaged"):  # and the framework, from the file's hash
        run_stage(train.STAGE, made.deployment, made.workdir)
