"""F10: loss mask not shifted with the labels; all-zero mask; wrong chat template. Caught before training."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.alignment import slot_mask
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.mask_check import check_slot_mask
from slipstream.tasks import dialogues, regenerate, resolve
from slipstream.tasks.conversations import read_conversations
from slipstream.tasks.stage import run_stage

CAUGHT = [
    (
        "F10",
        "regenerate, training",
        "the mask does not follow the labels; all zero; no framed answers",
    ),
]

CHAT = [
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "an apple and the end"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "another one"},
]
OFF = {"F10"}  # the check, switched off


@pytest.fixture(scope="module")
def tokenizer(chats: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    chats.save_tokenizer(directory)
    return ChatTokenizer(directory)


def config_for(target: Path, prompts: Path, workdir: Path) -> Deployment:
    return Deployment(
        target={"source": str(target)},
        data={"prompts": str(prompts), "max_new_tokens": 8},
        host={"workdir": workdir},
        server={"max_context_tokens": 200},
    )


# ---- the mask is not shifted with the labels


def unshifted(loss_mask: torch.Tensor, step: int) -> torch.Tensor:
    """The fault as several trainers have it: the mask of token t for slot t, whose label is token t + 2."""
    return loss_mask.clone()


def shifted_once(loss_mask: torch.Tensor, step: int) -> torch.Tensor:
    """Right at no step: the mask follows the embedded token, and the label of an answer's last slot lies outside."""
    return torch.cat([loss_mask[1:], torch.zeros(1, dtype=torch.bool)])


def frozen(loss_mask: torch.Tensor, step: int) -> torch.Tensor:
    """Right at step 1, and not shifted on with the later steps."""
    return slot_mask(loss_mask, 1)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_the_right_shift_passes(tokenizer: ChatTokenizer, step: int) -> None:
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    mask = tokenizer.loss_mask(ids)
    check_slot_mask(slot_mask(mask, step), list(tokenizer.answer_spans(ids)), step)


@pytest.mark.parametrize(
    ("fault", "step"), [(unshifted, 1), (unshifted, 3), (shifted_once, 1), (shifted_once, 2), (frozen, 2), (frozen, 4)]
)
def test_a_mask_that_does_not_follow_the_labels(tokenizer: ChatTokenizer, fault: object, step: int) -> None:
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    mask = tokenizer.loss_mask(ids)
    spans = list(tokenizer.answer_spans(ids))
    supervised = fault(mask, step)  # type: ignore[operator]
    assert supervised.shape == mask.shape  # nothing about its shape or count is suspicious
    assert 0 < int(supervised.sum()) <= int(mask.sum())
    with pytest.raises(SlipstreamError, match="does not follow the labels") as error:
        check_slot_mask(supervised, spans, step)
    assert error.value.fault == "F10"
    assert f"step {step}" in error.value.found
    assert "alignment.py" in error.value.do
    check_slot_mask(supervised, spans, step, skip=OFF)  # unnoticed


@pytest.mark.parametrize("fault", [unshifted, shifted_once, frozen])
def test_regenerate_stops_before_anything_is_trained(
    chats: ModuleType, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: object
) -> None:
    target = chats.save_chat_target(tmp_path / "target", tiny)
    prompts = chats.write_prompts(tmp_path / "prompts.jsonl", {"a": ["what is it"], "b": ["and then?"]})
    config = config_for(target, prompts, tmp_path / "run")
    run_stage(resolve.STAGE, config, config.host.workdir)
    monkeypatch.setattr(dialogues, "slot_mask", fault)
    with pytest.raises(SlipstreamError, match="does not follow the labels"):
        run_stage(regenerate.STAGE, config, config.host.workdir)
    monkeypatch.setattr(dialogues, "check_slot_mask", lambda *_: None)
    assert run_stage(regenerate.STAGE, config, config.host.workdir).status == "done"  # unnoticed


# ---- wrong chat template, all-zero mask


def test_ids_of_another_models_template_have_no_header(
    chats: ModuleType, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """The conversations were rendered with one template, the mask is looked for with another."""
    chats.save_tokenizer(tmp_path, chats.TEMPLATES["headers"], eos="<stop>")
    ids = ChatTokenizer(tmp_path).encode_chat(CHAT, add_generation_prompt=False)
    with pytest.raises(SlipstreamError, match="all zero") as error:
        tokenizer.loss_mask(ids)
    assert error.value.fault == "F10"
    assert "never contain the header '<|im_start|>assistant\\n'" in error.value.found
    assert "chat template" in error.value.do
    assert int(tokenizer.loss_mask(ids, skip=OFF).sum()) == 0  # unnoticed: a mask that teaches nothing


def test_a_template_whose_marks_the_tokenizer_does_not_know(
    chats: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    """Resolve refuses it: answers framed by ordinary text have no end that generation could stop at."""
    target = chats.save_chat_target(tmp_path / "target", tiny, template=chats.FOREIGN_TEMPLATE)
    prompts = chats.write_prompts(tmp_path / "prompts.jsonl", {"a": ["what is it"], "b": ["and then?"]})
    config = config_for(target, prompts, tmp_path / "run")
    with pytest.raises(SlipstreamError, match="does not frame answers") as error:
        run_stage(resolve.STAGE, config, config.host.workdir)
    assert error.value.fault == "F10"


def test_a_conversation_without_an_answer(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT[:1])
    with pytest.raises(SlipstreamError, match="the answer after the header is empty") as error:
        tokenizer.loss_mask(ids)
    assert error.value.fault == "F10"
    assert not tokenizer.loss_mask(ids, skip=OFF).any()  # unnoticed


def test_an_all_zero_mask_stops_the_stage(
    chats: ModuleType, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan finds nothing, as it did for every stock template without generation tags elsewhere."""
    target = chats.save_chat_target(tmp_path / "target", tiny)
    prompts = chats.write_prompts(tmp_path / "prompts.jsonl", {"a": ["what is it"], "b": ["and then?"]})
    config = config_for(target, prompts, tmp_path / "run")
    run_stage(resolve.STAGE, config, config.host.workdir)
    monkeypatch.setattr(ChatTokenizer, "answer_spans", lambda *_: iter(()))
    with pytest.raises(SlipstreamError, match="all zero"):
        run_stage(regenerate.STAGE, config, config.host.workdir)
    monkeypatch.setattr("slipstream.engine.chat.check_supervised", lambda *_: None)
    monkeypatch.setattr(dialogues, "check_own_tokens", lambda *_: None)
    monkeypatch.setattr(dialogues, "check_slot_mask", lambda *_: None)
    assert run_stage(regenerate.STAGE, config, config.host.workdir).figures["supervised_tokens"] == 0  # unnoticed


def test_a_prompt_that_contains_the_templates_own_marks(
    chats: ModuleType, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that quotes an answer would be supervised as if the target had said it."""
    target = chats.save_chat_target(tmp_path / "target", tiny)
    quote = "why? <|im_start|>assistant\nbecause<|im_end|>"
    prompts = chats.write_prompts(tmp_path / "prompts.jsonl", {"quoting": [quote], "b": ["and then?"]})
    config = config_for(target, prompts, tmp_path / "run")
    run_stage(resolve.STAGE, config, config.host.workdir)
    with pytest.raises(SlipstreamError, match="'quoting': the loss mask says") as error:
        run_stage(regenerate.STAGE, config, config.host.workdir)
    assert error.value.fault == "F10"
    monkeypatch.setattr(dialogues, "check_own_tokens", lambda *_: None)
    monkeypatch.setattr(dialogues, "check_slot_mask", lambda *_: None)
    run_stage(regenerate.STAGE, config, config.host.workdir)
    records = read_conversations(config.host.workdir / "regenerate" / regenerate.CONVERSATIONS)
    (quoting,) = (r for r in records if r.id == "quoting")
    assert 1 in quoting.loss_mask[: quoting.prompt_tokens]  # unnoticed
