"""Parity of the capture: every row that a trace holds against the eager capture of the very same input.

An average over a conversation cannot see one stale replay; a single row can. The eager capture is made offline, in one
process, by the prefill that extraction runs.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from slipstream.engine.trace import RequestTrace

MAX_ROW_ERROR = 0.25  # of the state's own size, in one row; rounding stays far below, another row's state is near 1


@dataclass(frozen=True)
class CapturedRows:
    """One slot of one conversation: served and eager states, [n, h] each, and which rows are wrong, [n] bool."""

    prompt: str
    token_ids: list[int]
    served: torch.Tensor
    eager: torch.Tensor
    wrong: torch.Tensor


@dataclass
class SlotRows:
    """Rows of one slot over all conversations.

    prompt_rows, round_rows: (wrong, all) of the rows that prefill and that rounds captured. first: where the first
    wrong one is. kept: every conversation's rows; a stale capture may hold those of any other.
    """

    slot: int
    prompt_rows: tuple[int, int] = (0, 0)
    round_rows: tuple[int, int] = (0, 0)
    first: str = ""
    kept: list[CapturedRows] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return self.prompt_rows[0] + self.round_rows[0]

    def add(self, rows: CapturedRows, trace: RequestTrace, prompt_tokens: int) -> None:
        """Counts one conversation of `prompt_tokens` prompt tokens."""
        wrong = rows.wrong
        self.prompt_rows = _sum(self.prompt_rows, wrong[:prompt_tokens])
        self.round_rows = _sum(self.round_rows, wrong[prompt_tokens:])
        if wrong.any() and not self.first:
            position = int(wrong.nonzero()[0])
            self.first = f"{rows.prompt}, position {position} ({_place(position, trace, prompt_tokens)})"
        self.kept.append(rows)

    def describe(self) -> str:
        (prompt_wrong, prompts), (round_wrong, rounds) = self.prompt_rows, self.round_rows
        text = f"wrong in {prompt_wrong} of {prompts} rows of prompts and {round_wrong} of {rounds} of rounds"
        return text + (f", first in {self.first}" if self.first else "")


def _sum(counted: tuple[int, int], wrong: torch.Tensor) -> tuple[int, int]:
    return counted[0] + int(wrong.sum()), counted[1] + len(wrong)


def _place(position: int, trace: RequestTrace, prompt_tokens: int) -> str:
    """The round that captured a position, or prefill."""
    if position < prompt_tokens:
        return "prefill"
    first_rows = [r.start - 1 for r in trace.rounds]  # a round's rows begin with its root
    return f"round {bisect_right(first_rows, position)} of {len(trace.rounds)}" if first_rows else "decode"


@dataclass
class CaptureFindings:
    """Every slot's rows, and whether the served tokens are those of plain decoding.

    tokens, tokens_differ: greedy tokens compared with those of plain decoding on the same context; how many differ.
    expands: plain decoding was run as a prompt, and latent attention on a CPU rounds otherwise there.
    """

    slots: dict[int, SlotRows] = field(default_factory=dict)
    tokens: int = 0
    tokens_differ: int = 0
    expands: bool = False

    def add(
        self,
        prompt: str,
        prompt_tokens: int,
        trace: RequestTrace,
        served: Mapping[int, torch.Tensor],
        eager: Mapping[int, torch.Tensor],
    ) -> None:
        """Compares one conversation; served, eager: slot -> [n, h]."""
        for slot, state in served.items():
            own = eager[slot].float()
            size = own.square().mean(0).sqrt().clamp(min=1e-6)  # [n, h] -> [h]
            error = ((state.float() - own) / size).square().mean(-1).sqrt()  # [n, h] -> [n]
            wrong = ~(error <= MAX_ROW_ERROR)  # a NaN is wrong
            rows = CapturedRows(prompt, trace.token_ids, state.float(), own, wrong)
            self.slots.setdefault(slot, SlotRows(slot)).add(rows, trace, prompt_tokens)

    def add_tokens(self, answer: torch.Tensor, plain: torch.Tensor) -> None:
        """answer [m] int64, the served tokens; plain [m], what plain decoding takes on the same context."""
        self.tokens += len(answer)
        self.tokens_differ += int((answer != plain).sum())

    def describe_tokens(self) -> str:
        if not self.tokens_differ:
            return f"tokens: all {self.tokens} are identical to K = 0 (with a wrong capture, too: they cannot show it)"
        words = f"tokens: {self.tokens_differ} of {self.tokens} differ from K = 0 on the same context"
        return words + (", which was run as a prompt: latent attention rounds otherwise there" if self.expands else "")
