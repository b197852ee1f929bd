"""The target answers prompts, many at a time, turn by turn on its own history."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from slipstream.engine.alignment import slot_mask
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.engine import Engine, Request
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.mask_check import check_slot_mask
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.conversations import ConversationRecord
from slipstream.tasks.prompts import Prompt, Split, assign_splits

if TYPE_CHECKING:
    from slipstream.configs.schema import Data

CHECKED_STEPS = 4  # draft steps at which the shift between mask and labels is checked on every conversation


@dataclass
class Dialogue:
    """A prompt on its way through its turns.

    Args:
        id: of the conversation that it becomes.
        prompt: what the user says.
        choice: which answer to this prompt: index into data.temperatures.
        split: "train" or "holdout".
        messages: the chat so far, the open question included.
        ids: token ids so far, up to where the open answer begins.
        answer: ids of the open answer.
        spans: (start, stop) in `ids` of the answers that are the target's own tokens.
        turn: index of the open turn.
        foreign: ids before this position are history that the template wrote anew, not the target's own tokens.
    """

    id: str
    prompt: Prompt
    choice: int
    split: Split
    messages: list[dict[str, str]]
    ids: list[int]
    answer: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    turn: int = 0
    foreign: int = 0


def start_dialogues(prompts: Sequence[Prompt], tokenizer: ChatTokenizer, data: "Data") -> list[Dialogue]:
    """Every (prompt, sample) with its first turn rendered. Raises SlipstreamError for a prompt that is too long."""
    splits = assign_splits(prompts, data.holdout_fraction, data.seed)
    dialogues = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt.turns[0]}]
        ids = tokenizer.encode_chat(messages)
        if len(ids) > data.max_prompt_tokens:
            raise SlipstreamError(
                f"prompt {prompt.id!r} has {len(ids)} tokens, the chat template included",
                expected=f"at most {data.max_prompt_tokens} (data.max_prompt_tokens)",
                do="shorten it in the file of data.prompts, or raise data.max_prompt_tokens",
            )
        split = splits[prompt.id]
        for choice in range(len(data.temperatures) if split == "train" else 1):
            name = prompt.id if choice == 0 else f"{prompt.id}~{choice}"
            dialogues.append(Dialogue(name, prompt, choice, split, list(messages), list(ids)))
    return dialogues


class Answers:
    """Runs dialogues through an engine.

    Args:
        engine: with nothing in it; it decides how many run at a time.
        tokenizer: of the engine's target.
        data: how answers are drawn and how long they may be.

    Attributes:
        tokens, seconds: new tokens so far, and the time that they took.
        turns_left_out: later turns not asked, because the answer before was cut off or the context is full.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, data: "Data") -> None:
        self.engine, self.tokenizer, self.data = engine, tokenizer, data
        self.tokens, self.seconds, self.turns_left_out = 0, 0.0, 0

    def of(self, dialogues: Sequence[Dialogue]) -> Iterator[ConversationRecord]:
        """Yields the conversation of each dialogue as it ends.

        A template may write history otherwise than the target said it (without its thoughts, say). Such a dialogue
        gives a conversation for each turn, the earlier ones as `id#turn`: every supervised token is the target's own.
        """
        by_id = {dialogue.id: dialogue for dialogue in dialogues}
        for dialogue in dialogues:
            self.engine.add_request(self._request(dialogue))
        started = time.monotonic()
        while self.engine.has_work:
            for output in self.engine.step():
                self.tokens += len(output.new_token_ids)
                self.seconds = time.monotonic() - started
                dialogue = by_id[output.request_id]
                dialogue.answer += output.new_token_ids
                if output.finish_reason is not None:
                    yield from self._end_turn(dialogue, output.finish_reason)

    def _request(self, dialogue: Dialogue) -> Request:
        data = self.data
        # A seed of its own for each prompt and turn: what one prompt draws does not depend on the others in the file.
        name = hashlib.sha256(f"{data.seed}/{dialogue.prompt.id}/{dialogue.turn}".encode())
        params = SamplingParams(
            temperature=data.temperatures[dialogue.choice],
            top_p=data.top_p,
            seed=int.from_bytes(name.digest()[:8], "big") >> 1,
            max_tokens=data.max_new_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
        )
        return Request(dialogue.id, list(dialogue.ids), params, choice_index=dialogue.choice)

    def _end_turn(self, dialogue: Dialogue, finish_reason: str) -> Iterator[ConversationRecord]:
        start = len(dialogue.ids)
        dialogue.ids += dialogue.answer
        dialogue.spans.append((start, len(dialogue.ids)))
        following = self._following_ids(dialogue, finish_reason)
        dialogue.answer = []
        if following is None:
            yield self._record(dialogue, dialogue.id, finish_reason)
            return
        if following[: len(dialogue.ids)] != dialogue.ids:
            yield self._record(dialogue, f"{dialogue.id}#{dialogue.turn + 1}", finish_reason)
            dialogue.spans, dialogue.foreign = [], len(following)
        dialogue.ids, dialogue.turn = following, dialogue.turn + 1
        self.engine.add_request(self._request(dialogue))

    def _following_ids(self, dialogue: Dialogue, finish_reason: str) -> list[int] | None:
        """Prompt of the next turn, as a server's client would send it; None when this answer was the last."""
        rest = dialogue.prompt.turns[dialogue.turn + 1 :]
        if not rest:
            return None
        said = self.tokenizer.decode(dialogue.answer)
        dialogue.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": rest[0]}]
        ids = self.tokenizer.encode_chat(dialogue.messages)
        if finish_reason != "stop" or len(ids) >= self.engine.config.max_context_tokens:
            self.turns_left_out += len(rest)
            return None
        return ids

    def _record(self, dialogue: Dialogue, name: str, finish_reason: str) -> ConversationRecord:
        mask = self.tokenizer.loss_mask(dialogue.ids)  # [T]
        mask[: dialogue.foreign] = False
        check_own_tokens(mask, dialogue.spans, name)
        for step in range(1, CHECKED_STEPS + 1):
            check_slot_mask(slot_mask(mask, step), dialogue.spans, step)
        return ConversationRecord(
            id=name,
            category=dialogue.prompt.category,
            split=dialogue.split,
            token_ids=list(dialogue.ids),
            loss_mask=mask.int().tolist(),
            prompt_tokens=dialogue.spans[0][0],
            finish_reason=finish_reason,
        )


def check_own_tokens(mask: torch.Tensor, spans: Sequence[tuple[int, int]], name: str) -> None:
    """The mask found by scanning ids [T] is exactly where the engine wrote. Raises SlipstreamError (F10) if not."""
    own = torch.zeros_like(mask)
    for start, stop in spans:
        own[start:stop] = True
    wrong = (mask != own).nonzero().flatten().tolist()
    if wrong:
        raise SlipstreamError(
            f"conversation {name!r}: the loss mask says {int(mask.sum())} tokens are the target's, it wrote "
            f"{int(own.sum())}; they differ first at token {wrong[0]}",
            expected="a mask on the tokens that the target produced, and on no others",
            do="if this prompt's text contains the template's own marks, take them out; otherwise the chat template is "
            "not this target's",
            fault="F10",
        )
