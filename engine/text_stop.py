"""From a stream of token ids to text that may be sent: whole characters only, and nothing past a stop string."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer (engine.chat.ChatTokenizer has it)."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class StreamDetokenizer:
    """Decodes ids as they come. The pieces joined are exactly `decode(all ids)`; none ends in half a character.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens)`.
        skip_special_tokens: leave the template's marks out of the text.
    """

    # Decoding starts again from a recent token once the window is this long, so that a long answer stays linear.
    _WINDOW_TOKENS = 16

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new ids, returns the text that is now certain ("" while a character is incomplete)."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        # A character may be spread over several tokens: hold back what the next token could still complete.
        piece = text.rstrip(REPLACEMENT)[self._emitted :]
        self._emitted += len(piece)
        if self._emitted == len(text) and len(self._window) > self._WINDOW_TOKENS:
            # The last token stays as context: some tokenizers drop the space before a text's first word.
            self._window = self._window[-1:]
            self._emitted = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """The rest, when no more ids will come; bytes that never became a character show as U+FFFD."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Finds stop strings in streamed text, also those that span pieces, and holds back what could begin one.

    The match that is complete first ends the text (of several complete at the same character, the longest), so the
    result does not depend on how the text was cut into pieces.

    Args:
        stops: stop strings, none of them empty; an empty sequence passes all text through.

    Attributes:
        matched: the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not s for s in stops):
            raise ValueError("a stop string is empty: it would end every answer before its first token")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Takes text. Returns what may be sent; look at `matched` afterwards.

        After a match every further call returns "".
        """
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        keep = self._could_begin(text)
        out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return out

    def finish(self) -> str:
        """The text held back, when no more will come and nothing matched."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if not found:
            return None
        end, _, stop = min(found)
        return end - len(stop), stop

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
