"""What a traced request leaves behind: the evidence that parity reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory: what a launch left is overwritten by the next one."""
    return tensor.to("cpu", copy=True)


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request.

    Args:
        start: committed tokens before the round; draft i (from 0) proposes the token at position start + i.
        draft_tokens: [K] int64, target ids.
        draft_logits: [K, Vd], or None where the proposer has none.
        num_valid: how many of the K drafts could be used (max_tokens and the context's end clamp them).
        accepted: how many were accepted.
    """

    start: int
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor | None
    num_valid: int
    accepted: int


@dataclass(frozen=True)
class RequestTrace:
    """States at the committed positions 0..n-1, n = tokens - 1 (the last token never went through the target).

    Args:
        token_ids: prompt and answer, n + 1 of them.
        states: slot name -> [n, h], every captured slot.
        teacher: [n, h], slot N before the final norm.
        target_argmax: [n] int64, the target's most likely next token.
        rounds: in order.
    """

    token_ids: list[int]
    states: Mapping[str, torch.Tensor]
    teacher: torch.Tensor
    target_argmax: torch.Tensor
    rounds: list[RoundTrace]


@dataclass
class TraceRecorder:
    """Collects the pieces while a request runs."""

    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    teacher: list[torch.Tensor] = field(default_factory=list)
    argmax: list[torch.Tensor] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)

    def add(self, states: Mapping[str, torch.Tensor], teacher: torch.Tensor, logits: torch.Tensor) -> None:
        """Rows of one request that are committed now: states [r, h] by name, teacher [r, h], logits [r, V]."""
        self.states.append({name: on_host(state) for name, state in states.items()})
        self.teacher.append(on_host(teacher))
        self.argmax.append(logits.max(dim=-1).indices.cpu())  # [r, V] -> [r]

    def finish(self, token_ids: list[int]) -> RequestTrace:
        """The trace, cut to the tokens that were kept."""
        n = len(token_ids) - 1
        names = self.states[0] if self.states else {}
        return RequestTrace(
            token_ids,
            {name: torch.cat([s[name] for s in self.states])[:n] for name in names},
            torch.cat(self.teacher)[:n],
            torch.cat(self.argmax)[:n],
            self.rounds,
        )
