"""Parity of the choice of experts: transformers goes where the server went, and says how near each choice was.

Two right computations in bf16 send some rows to other experts, since two experts often score alike. What that does is
no rounding: of transformers' own bf16 against its fp32, on tiny random Kimi-K2.5 (8 of 16 experts), 8 % of the choices
differ, and the last slot by 17 % of its size in a row that went elsewhere (at most 53 %), by 4 % (14 %) in the rows
behind, which see it, and by 2 % (5 %) before. No bound tells that from a fault. So the choices travel with a trace, as
its tokens do, and transformers is made to follow both: then all rows differ by 2.7 % (8 %), and states, logits and
acceptance are compared as tightly as a dense target's. The choices themselves are judged here, on that one history, by
what transformers does with it:

- a choice that its fp32 would not make is one of near equals: scores must move by no more than its own bf16 moves them;
- there are no more of them than transformers in bf16 has against its fp32, and no more that it would not make in bf16
  than it has against itself, with its other attention or in fp32, as for tokens (`slipstream.tasks.agreement_bound`).

How much an expert counts is transformers' own word, so that wrong weights show in the states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.tasks.agreement_bound import MIN_POSITIONS, STANDARD_ERRORS, allowed_differences

# How far two scores may have moved together: each by as much as the most of its layer, were its error ours; and ours
# may be half as large again, as that of logits.
SCORES_OF_A_TIE = 2 * 1.5
_FP32_STEP = 2.0**-16  # of bf16's


@dataclass(frozen=True)
class Routed:
    """What the router of one layer made of n rows.

    scores: [n, E] fp32, what experts are chosen by (the bias is in it). ids: [n, k] int64, whom it would choose.
    """

    scores: torch.Tensor
    ids: torch.Tensor


class FollowedRouters:
    """The routers of one of transformers' models, which go where they are told and note where they would have gone.

    groups, kept: parts that the experts are in, and how many of them a row may choose from.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._told: Mapping[int, torch.Tensor] = {}
        self._noted: dict[int, Routed] = {}
        self.groups = self.kept = 1
        for layer, block in enumerate(model.get_decoder().layers):
            router: Any = getattr(block.mlp, "gate", None)
            if hasattr(router, "e_score_correction_bias"):
                self.groups, self.kept = router.num_group, router.topk_group
                router.register_forward_hook(self._hook(layer))

    def follow(self, choices: Mapping[int, torch.Tensor]) -> None:
        """From now on: layer -> [n, k], of the n rows of the next pass; {}: their own."""
        self._told, self._noted = choices, {}

    def noted(self) -> dict[int, Routed]:
        """Of the last pass, by layer."""
        return self._noted

    def _hook(self, layer: int) -> Any:
        def hook(router: Any, _args: object, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
            logits, weights, ids = out  # [n, E], [n, k], [n, k]
            scores = logits.float().sigmoid()
            self._noted[layer] = Routed(scores + router.e_score_correction_bias, ids)
            if layer not in self._told:
                return out
            ids = self._told[layer].to(ids.device, ids.dtype)
            weights = scores.gather(1, ids)
            if router.norm_topk_prob:
                weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
            return logits, weights * router.routed_scaling_factor, ids

        return hook


@dataclass(frozen=True)
class ReferenceChoices:
    """Layer -> what its router makes of the rows, on the history that was followed: in fp32, and in bf16 with its two
    attentions. groups, kept: as in `FollowedRouters`."""

    exact: Mapping[int, Routed]
    bf16: Mapping[int, Routed]
    eager: Mapping[int, Routed]
    groups: int = 1
    kept: int = 1

    def cpu(self) -> "ReferenceChoices":
        exact, bf16, eager = (
            {layer: Routed(one.scores.cpu(), one.ids.cpu()) for layer, one in routed.items()}
            for routed in (self.exact, self.bf16, self.eager)
        )
        return ReferenceChoices(exact, bf16, eager, self.groups, self.kept)


@dataclass
class ExpertFindings:
    """Choices of the server against those of transformers, summed over conversations.

    Args:
        independent: as in `parity_target.LogitFindings`.
        choices: rows x layers compared.
        differ: of them, where transformers in the server's dtype would have gone to another set of experts.
        self_differ: in bf16, where it would itself with its other attention.
        reference_differ: where its fp32 and its bf16 differ.
        own_differ: where we and its fp32 do.
        beyond_tie: those of them for which scores moved further than `SCORES_OF_A_TIE`.
        largest_gap: the furthest, in what the layer's scores move at most from its fp32 to its bf16.
        where: the choices beyond, in words; the first few.
    """

    independent: bool = False
    choices: int = 0
    differ: int = 0
    self_differ: int = 0
    reference_differ: int = 0
    own_differ: int = 0
    beyond_tie: int = 0
    largest_gap: float = 0.0
    where: list[str] = field(default_factory=list)

    def add(self, name: str, choices: Mapping[int, torch.Tensor], reference: ReferenceChoices, in_bf16: bool) -> None:
        """Counts one conversation.

        Args:
            name: of its prompt.
            choices: layer -> [n, k], where the server went.
            reference: where transformers would have gone.
            in_bf16: the server's dtype; else it is fp32.
        """
        for layer, ids in choices.items():
            exact, bf16, eager = (r[layer] for r in (reference.exact, reference.bf16, reference.eager))
            ours, right, rounded = (_members(one, exact.scores) for one in (ids.long(), exact.ids, bf16.ids))
            self.choices += len(ids)
            self.own_differ += int((flips := (ours ^ right).any(1)).sum())
            self.reference_differ += int((rounded ^ right).any(1).sum())
            self.differ += int((ours ^ (rounded if in_bf16 else right)).any(1).sum())
            if in_bf16:  # in fp32 the two are one
                self.self_differ += int((_members(eager.ids, exact.scores) ^ rounded).any(1).sum())
            moved = float((bf16.scores - exact.scores).abs().max()) * (1 if in_bf16 else _FP32_STEP)
            gaps = choice_gaps(exact.scores, ours, reference.groups, reference.kept) / max(moved, 1e-12)  # [n]
            self.largest_gap = max(self.largest_gap, float((gaps * flips).max()))
            for row in (flips & ~(gaps <= SCORES_OF_A_TIE)).nonzero()[:, 0].tolist():
                self.beyond_tie += 1
                if len(self.where) < 3:
                    self.where.append(f"layer {layer}, {name}, position {row} ({gaps[row]:.1f} x)")

    @property
    def allowed(self) -> float:
        """Of `differ`: as often as transformers differs from itself."""
        reference = self.reference_differ if self.self_differ else 0
        return allowed_differences(0.0, self.choices, self.self_differ, reference, self.independent)

    @property
    def allowed_own(self) -> float:
        """Of `own_differ`: as often as its bf16, two standard errors aside."""
        error = (self.reference_differ + self.own_differ) ** 0.5
        return max(self.reference_differ + STANDARD_ERRORS * error, MIN_POSITIONS)

    def failures(self) -> list[str]:
        """What is wrong, in sentences."""
        found = []
        if self.beyond_tie:
            found.append(
                f"experts: {self.beyond_tie} of {self.choices} choices are none of near equals: scores would have to "
                f"move {self.largest_gap:.1f} times as far as the bf16 of transformers moves them (at most "
                f"{SCORES_OF_A_TIE:g}): {'; '.join(self.where)}: the router's weight, bias or rule, or the state that "
                "it reads"
            )
        if self.differ > self.allowed or self.own_differ > self.allowed_own:
            found.append(
                f"experts: {self.describe()}; at most {self.allowed:.0f} and {self.allowed_own:.0f} were to be expected"
            )
        return found

    def describe(self) -> str:
        return (
            f"{self.differ} of {self.choices} choices (rows x layers) are not those of transformers on the same history"
            f" (of its own two attentions {self.self_differ}, of its bf16 and fp32 {self.reference_differ}), "
            f"{self.own_differ} not those of its fp32; scores of the furthest moved {self.largest_gap:.1f} times as "
            f"far as its bf16 moves them (at most {SCORES_OF_A_TIE:g}). Everything else is compared where transformers "
            "went to the server's experts"
        )


def choice_gaps(scores: torch.Tensor, chosen: torch.Tensor, groups: int = 1, kept: int = 1) -> torch.Tensor:
    """How far scores must move, two of them together, until `chosen` is what they choose: [n], 0 where it is.

    Args:
        scores: [n, E], what experts are chosen by.
        chosen: [n, E] bool.
        groups: parts that the experts are in; the best go by the sum of their two best scores.
        kept: parts that a row may choose from.
    """
    lowest = scores.masked_fill(~chosen, torch.inf).amin(1, keepdim=True)  # [n, 1]
    above = (scores - lowest).clamp(min=0).masked_fill(chosen, 0)  # [n, E], of those that were left out
    if groups == 1:
        return above.amax(1)
    parts = scores.unflatten(1, (groups, -1))  # [n, E] -> [n, G, E / G]
    best = parts.topk(min(2, parts.shape[2]), dim=2).values.sum(2)  # [n, G]
    rank = best.sort(dim=1, descending=True).values  # [n, G]
    last, first_out = rank[:, kept - 1, None], rank[:, min(kept, groups - 1), None]  # [n, 1]
    used = chosen.unflatten(1, (groups, -1)).any(2)  # [n, G]
    # A part that was used and is not among the best must rise; one among the best of which none was taken may have been
    # left out as a whole, if it can fall. Its score is of two, so half of it counts.
    rise = ((last - best).clamp(min=0) / 2).masked_fill(~used, 0)
    fall = ((best - first_out).clamp(min=0) / 2).masked_fill(used, torch.inf)
    above = above.unflatten(1, (groups, -1)).amax(2)  # [n, G]
    above = torch.minimum(above, fall).masked_fill(~used & (best < last), 0)
    return torch.maximum(rise, above).amax(1)


def _members(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """ids [n, k] -> whether each of `like`'s [n, E] is among them, bool."""
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, ids.to(like.device), True)
