"""Chats as token ids: the chat template and the loss mask.

The assistant's marks (the ids that open an answer, the id that ends it) are read off the template itself by rendering
probe chats. The loss mask is then found by scanning token ids for these marks: no string is ever tokenised a second
time, so the mask cannot drift from the tokens that the target produced.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import eos_token_ids, read_model_json
from slipstream.engine.tiktoken_files import is_kimi_form, read_kimi_tokenizer

Message = Mapping[str, Any]

# Probe texts differ in their first and in their last token, so that what all renderings share is the template's.
_PROBES = ("Alpha beta seven", "Seven gamma three", "Many green roofs")


@dataclass(frozen=True)
class AssistantMarks:
    """How a template frames an assistant answer.

    Args:
        header: ids before every answer.
        opened: ids that only the prompt for a new answer has after the header (an opened thought, say), often none.
        end: the id that closes an answer.
    """

    header: tuple[int, ...]
    opened: tuple[int, ...]
    end: int


class ChatTokenizer:
    """Tokenizer and chat template of a target directory.

    Args:
        directory: Hugging Face model directory with tokenizer files and, where it exists, generation_config.json.

    No code of the directory is run: Kimi's own form is read as data, and one that needs its code is refused.

    Raises:
        SlipstreamError: no tokenizer in the directory, or one that needs code of its own. A missing or unusable chat
            template is an error of the calls that need one (F10), since text completion works without.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():  # transformers would take it for a name on the hub
            raise SlipstreamError(
                f"{directory} is {'no directory' if self.directory.exists() else 'not there'}",
                expected="the target's Hugging Face model directory",
                do="correct --target, or run the stage `resolve` again",
            )
        self.tokenizer = self._load()
        self._marks: AssistantMarks | None = None

    def _load(self) -> PreTrainedTokenizerBase:
        directory = self.directory
        if is_kimi_form(directory):
            return read_kimi_tokenizer(directory)
        refuse_code(directory)
        try:
            # Without `trust_remote_code` transformers asks at the terminal; here nothing is run, asked or not.
            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises a dozen types here; each means the same to the user
            raise SlipstreamError(
                f"no usable tokenizer in {directory}: {error}",
                expected="tokenizer.json, tokenizer_config.json and a readable config.json in the target's directory",
                do="run the stage `resolve` again, or point target.source at a complete model directory",
            ) from error

    # ---- ids and text

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included (the model's table may be larger)."""
        return len(self.tokenizer)

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, as the engine reads them: config.json and generation_config.json together.

        Only where neither names one, the tokenizer's own.
        """
        ids = eos_token_ids(self.directory)
        if not ids and self.tokenizer.eos_token_id is not None:
            return (int(self.tokenizer.eos_token_id),)
        return ids

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which an answer ends: the end-of-sequence ids and the template's end of an answer."""
        ids = set(self.eos_token_ids)
        if self.chat_template is not None:
            ids.add(self.marks.end)
        return tuple(sorted(ids))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, as a completion's prompt: nothing is added before or after it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat; marks such as <|im_end|> inside a message's text become the marks themselves.

        Args:
            messages: {"role", "content"} in order.
            add_generation_prompt: end with the ids that open an assistant answer.

        Raises: SlipstreamError when there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise SlipstreamError(
                f"{self.directory} has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                do="use a chat model as target, or add its template to the directory",
                fault="F10",
            )
        try:
            ids = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=True,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
            )
        except Exception as error:  # templates raise jinja errors, but also TypeError and KeyError on odd messages
            roles = [m.get("role") for m in messages]
            raise SlipstreamError(
                f"the chat template refused messages with roles {roles}: {error}",
                expected="messages as this model's template knows them (often: user and assistant in turn)",
                do="change the messages; the template is in the target's directory",
            ) from error
        return list(cast(list[int], ids))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, spaces untouched. Half a character at either end shows as U+FFFD."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    # ---- loss mask

    @property
    def marks(self) -> AssistantMarks:
        """The template's marks of an assistant answer, derived once. Raises SlipstreamError (F10) if it has none."""
        if self._marks is None:
            self._marks = self._derive_marks()
        return self._marks

    def _derive_marks(self) -> AssistantMarks:
        question, other, answer = _PROBES
        user = [{"role": "user", "content": question}]
        plain = self.encode_chat(user, add_generation_prompt=False)
        opened = self.encode_chat(user, add_generation_prompt=True)
        answers = [{"role": "assistant", "content": text} for text in (answer, other)]
        answered = [self.encode_chat([*user, message], add_generation_prompt=False) for message in answers]
        special = set(self.tokenizer.all_special_ids) | set(self.eos_token_ids)
        header: list[int] = []
        beyond: list[int] = []
        if opened[: len(plain)] == plain:
            # The prompt for an answer may say more than history does: the header is what both show.
            header = _common_prefix(*(ids[len(plain) :] for ids in [opened, *answered]))
            beyond = opened[len(plain) + len(header) :]
        if not header:
            # Templates in the style of [INST] ... [/INST] open the answer by closing the question. Ordinary text before
            # the mark is left out: it could merge with the end of a question.
            others = self.encode_chat([{"role": "user", "content": other}], add_generation_prompt=True)
            header = _common_suffix(opened, others)
            header = header[next((i for i, token in enumerate(header) if token in special), 0) :]
            beyond = []
        tail = _common_suffix(*answered)
        if not header or not tail or tail[0] not in special:
            raise SlipstreamError(
                f"the chat template does not frame answers: header ids {list(header)}, closing ids {list(tail)}",
                expected="the same ids before every assistant answer, and a special token right after it",
                do="check chat_template in the target's directory against the model's own",
                fault="F10",
            )
        return AssistantMarks(header=tuple(header), opened=tuple(beyond), end=int(tail[0]))

    def answer_spans(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Start and stop (exclusive) of each assistant answer, its end token included, found by scanning ids.

        An answer cut off by the token limit has no end token and reaches to the end of the ids.
        """
        header, opened, end = self.marks.header, self.marks.opened, self.marks.end
        ids, at = tuple(token_ids), 0
        while at + len(header) <= len(ids):
            if ids[at : at + len(header)] != header:
                at += 1
                continue
            start = at + len(header)
            if opened and ids[start : start + len(opened)] == opened:
                start += len(opened)
            at = ids.index(end, start) + 1 if end in ids[start:] else len(ids)
            if at > start:
                yield start, at

    def loss_mask(self, token_ids: Sequence[int], *, skip: Collection[str] = ()) -> torch.Tensor:
        """Which tokens are the assistant's own.

        Args:
            token_ids: T ids of one conversation.
            skip: faults whose check is switched off; only the tests of the faults use it.

        Returns:
            [T] bool, true on every token of every answer, the end token included.

        Raises:
            SlipstreamError (F10): not one token is true, or the ids do not contain the template's header at all.
        """
        mask = torch.zeros(len(token_ids), dtype=torch.bool)
        for start, stop in self.answer_spans(token_ids):
            mask[start:stop] = True
        if "F10" not in skip:
            check_supervised(mask, token_ids, self)
        return mask


def refuse_code(directory: Path) -> None:
    """Raises SlipstreamError, which names it, for a tokenizer that is nothing without code of the directory's own."""
    named = (read_model_json(directory / "tokenizer_config.json").get("auto_map") or {}).get("AutoTokenizer")
    classes = [name for name in (named if isinstance(named, list) else [named]) if name]
    if not classes or (directory / "tokenizer.json").is_file():
        return
    files = sorted({f"{directory / name.rpartition('.')[0]}.py" for name in classes})
    raise SlipstreamError(
        f"the tokenizer of {directory} is the class {', '.join(classes)}: to load it, {', '.join(files)} would have to "
        "be run, with all that a program of yours may do",
        expected="tokenizer.json, or tiktoken.model in the form of Kimi-K2 (tokenizer_class TikTokenTokenizer)",
        do="read that file; if you trust it, run it once by hand to write a tokenizer.json into the directory",
        runbook="tokenizer-code.md",
    )


def check_supervised(mask: torch.Tensor, token_ids: Sequence[int], tokenizer: ChatTokenizer) -> None:
    """Stops at a mask without a true token: [T] bool. Raises SlipstreamError (F10) with what the ids begin with."""
    if bool(mask.any()):
        return
    header = tokenizer.decode(tokenizer.marks.header, skip_special_tokens=False)
    has_header = tokenizer.marks.header in _windows(token_ids, len(tokenizer.marks.header))
    begin = tokenizer.decode(token_ids[:40], skip_special_tokens=False)
    why = "the answer after the header is empty" if has_header else f"the ids never contain the header {header!r}"
    raise SlipstreamError(
        f"the loss mask of {len(token_ids)} tokens is all zero: {why}. They begin with {begin!r}",
        expected=f"{header!r}, an answer, and the end token {tokenizer.decode([tokenizer.marks.end], False)!r}",
        do="render the chats with the chat template of this target's own directory",
        fault="F10",
    )


def mask_runs(mask: torch.Tensor) -> list[tuple[int, int, bool]]:
    """[T] bool -> (start, stop, value) of each run of equal values, in order."""
    runs: list[tuple[int, int, bool]] = []
    for at, on in enumerate(mask.tolist()):
        if runs and runs[-1][2] == bool(on):
            runs[-1] = (runs[-1][0], at + 1, bool(on))
        else:
            runs.append((at, at + 1, bool(on)))
    return runs


def _windows(ids: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}


def _common_prefix(*lists: Sequence[int]) -> list[int]:
    common = []
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return common


def _common_suffix(*lists: Sequence[int]) -> list[int]:
    return _common_prefix(*[list(reversed(ids)) for ids in lists])[::-1]
