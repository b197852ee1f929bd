"""Answers in OpenAI's form, whole and in pieces."""

import json
import time
import uuid
from typing import Any, Literal

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.serving.generation import Delta, Generation, TokenLogprob
from slipstream.engine.text_stop import REPLACEMENT

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Answer:
    """Builds the JSON of one answer.

    Args:
        endpoint: which of the two forms.
        model: name to report.
        tokenizer: spells tokens for logprobs.
        fingerprint: reported as system_fingerprint: which weights and settings answered.
        prompt_ids: ids of the prompt, if they were asked for.
    """

    def __init__(
        self,
        endpoint: Literal["chat", "completion"],
        model: str,
        tokenizer: ChatTokenizer,
        fingerprint: str,
        prompt_ids: list[int] | None,
    ) -> None:
        self._chat = endpoint == "chat"
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._text_offset, self._begun = 0, False
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, deltas: list[Delta], generation: Generation) -> dict[str, Any]:
        """The answer in one piece, from all its deltas."""
        joined = Delta(finish_reason=generation.finish_reason)
        for delta in deltas:
            joined.text += delta.text
            joined.token_ids += delta.token_ids
            joined.logprobs += delta.logprobs
        choice: dict[str, Any] = {"index": 0, "finish_reason": joined.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": joined.text}
        else:
            choice["text"] = joined.text
        self._add_extras(choice, joined)
        return {**self._head, "choices": [choice], "usage": generation.usage(), **self._prompt()}

    def chunk(self, delta: Delta, usage: dict[str, int] | None) -> dict[str, Any]:
        """One round's piece of a streamed answer; the last one carries the finish reason."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": delta.finish_reason}
        if self._chat:
            choice["delta"] = {"content": delta.text} if self._begun else {"role": "assistant", "content": delta.text}
        else:
            choice["text"] = delta.text
        self._add_extras(choice, delta)
        prompt = {} if self._begun else self._prompt()
        self._begun = True
        return {**self._chunk_head(), "choices": [choice], **prompt, **({"usage": usage} if usage else {})}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The event after the last piece, for stream_options.include_usage."""
        return {**self._chunk_head(), "choices": [], "usage": usage}

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    def _prompt(self) -> dict[str, Any]:
        return {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids}

    def _add_extras(self, choice: dict[str, Any], delta: Delta) -> None:
        choice["logprobs"] = self._logprobs(delta.logprobs) if delta.logprobs else None
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            content = [
                {**self._spell(e.token_id, e.logprob), "top_logprobs": [self._spell(*top) for top in e.top]}
                for e in entries
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._text(i): logprob for i, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _spell(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        whole = REPLACEMENT not in text
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    def _text(self, token_id: int) -> str:
        """A token's spelling; its id where it is only a part of a character, since many would look alike."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text if REPLACEMENT not in text else f"token_id:{token_id}"
