"""From an answer's tokens to its text: one place for streamed and whole answers, so that they cannot differ.

Tokens are taken one by one, whatever number of them a round commits: text, finish reason and usage are then the same
for every K.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.serving.protocol import Tokens
from slipstream.engine.text_stop import StopStrings, StreamDetokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the most likely ones at its place, best first: (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Delta:
    """What one round adds to an answer. `text` may be empty while a character or a stop string is incomplete."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Generation:
    """State of one answer.

    Args:
        tokenizer: of the target.
        prompt_tokens: length of the prompt in tokens.
        stop: stop strings; the text ends before the first that appears.
        logprobs: whether they were asked for.

    Attributes:
        finish_reason: "stop" or "length", once the answer ended.
        completion_tokens: tokens generated so far, the end token or the one that completed a stop string included.
    """

    def __init__(self, tokenizer: ChatTokenizer, prompt_tokens: int, stop: Sequence[str], logprobs: bool) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer)
        self._stop_strings = StopStrings(stop)
        self._logprobs = logprobs
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0
        self.finish_reason: str | None = None

    def push(self, tokens: Tokens) -> Delta:
        """Takes one round's tokens. After a stop string the rest of them is dropped and the answer is finished."""
        delta = Delta()
        last = len(tokens.token_ids) - 1
        for index, token_id in enumerate(tokens.token_ids):
            self.completion_tokens += 1
            delta.token_ids.append(token_id)
            if self._logprobs and tokens.logprobs is not None:
                logprob, top = tokens.logprobs[index]
                delta.logprobs.append(TokenLogprob(token_id, logprob, tuple(top)))
            if index == last and tokens.finish_reason == "stop":
                break  # an end token is no text
            delta.text += self._stop_strings.push(self._detokenizer.push([token_id]))
            if self._stop_strings.matched is not None:
                self.finish_reason = delta.finish_reason = "stop"
                return delta
        if tokens.finish_reason is not None:
            self._finish(delta, tokens.finish_reason)
        return delta

    def _finish(self, delta: Delta, reason: str) -> None:
        delta.text += self._stop_strings.push(self._detokenizer.finish())
        if self._stop_strings.matched is not None:
            reason = "stop"
        else:
            delta.text += self._stop_strings.finish()
        self.finish_reason = delta.finish_reason = reason

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
