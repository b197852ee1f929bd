"""Parity of the target: what the server captured and computed, against transformers on the same tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from slipstream.engine.capture import slot_name
from slipstream.engine.models import TargetModel
from slipstream.engine.trace import RequestTrace
from slipstream.tasks.agreement_bound import MAX_ERROR_RATIO, MIN_POSITIONS, STANDARD_ERRORS, allowed_differences
from slipstream.tasks.parity_experts import FollowedRouters, ReferenceChoices
from slipstream.tasks.reference_model import reference_model

BF16_ULPS_OF_A_TIE = 2
# Of a slot's own size. Where all other states are far larger, as beside the embedding, no share of theirs is a bound.
MAX_SLOT_ERROR = 0.25
_COPIES = 3  # fp32 and bf16, of bf16 on disk
_ROOM_BYTES = 4 << 30  # states and logits of a long prompt, the libraries' own
_BF16_STEPS = 2.0**-7  # spacing of bf16 numbers in [1, 2)


@dataclass(frozen=True)
class Reference:
    """transformers' own pass over the tokens of a trace.

    states: N + 1 of [n, h] fp32, index = canonical slot (the last one before the final norm).
    logits: [n, V] fp32, by fp32 weights; logits_bf16: [n, V], by bf16 weights; both by its attention "sdpa".
    argmax_eager: [n], the most likely tokens in bf16 by its attention "eager".
    experts: where its routers would have gone; None where it has none.
    """

    states: list[torch.Tensor]
    logits: torch.Tensor
    logits_bf16: torch.Tensor
    argmax_eager: torch.Tensor
    experts: ReferenceChoices | None = None

    def cpu(self) -> "Reference":
        states = [state.cpu() for state in self.states]
        experts = self.experts and self.experts.cpu()
        return Reference(states, self.logits.cpu(), self.logits_bf16.cpu(), self.argmax_eager.cpu(), experts)


class TargetReference:
    """The target as transformers runs it, in fp32 and in bf16.

    Args:
        model_dir: Hugging Face directory of the target.
        device: where transformers runs, and where its states and logits are handed out.
    """

    def __init__(self, model_dir: Path, device: str = "cpu") -> None:
        transformers_logging.disable_progress_bar()  # the stage shows its own progress
        self._device = device
        self._fp32 = self._load(model_dir, torch.float32)
        self._bf16 = self._load(model_dir, torch.bfloat16)
        self._routers = FollowedRouters(self._fp32), FollowedRouters(self._bf16)
        self._last: list[torch.Tensor] = []
        # transformers hands out slot N after the final norm; its input is what the canonical slot means.
        final_norm = self._fp32.get_decoder().norm
        final_norm.register_forward_pre_hook(lambda _module, args: self._last.append(args[0]))

    def _load(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        return cast(PreTrainedModel, reference_model(model_dir, dtype).to(self._device))  # type: ignore[arg-type]

    @torch.no_grad()
    def run(self, token_ids: Sequence[int], choices: Mapping[int, torch.Tensor] | None = None) -> Reference:
        """Its states and logits at each token.

        Args:
            token_ids: n ids.
            choices: layer -> [n, k], the experts that rows are to go to; None: those that it chooses itself.
        """
        ids = torch.tensor([list(token_ids)], device=self._device)  # [1, n]
        for routers in self._routers:
            routers.follow(choices or {})
        exact, rounded = self._routers
        self._last.clear()
        out = self._fp32(ids, output_hidden_states=True)
        states = [state[0] for state in out.hidden_states[:-1]] + [self._last[-1][0]]  # [1, n, h] -> [n, h]
        logits_bf16 = self._bf16(ids).logits[0].float()  # [1, n, V] -> [n, V]
        by_sdpa = dict(rounded.noted())
        self._bf16.set_attn_implementation("eager")
        try:
            argmax_eager = self._bf16(ids).logits[0].argmax(-1)  # [1, n, V] -> [n]
        finally:
            self._bf16.set_attn_implementation("sdpa")
        experts = None
        if by_sdpa:
            experts = ReferenceChoices(dict(exact.noted()), by_sdpa, dict(rounded.noted()), exact.groups, exact.kept)
        return Reference(states, out.logits[0].float(), logits_bf16, argmax_eager, experts)


def reference_device(model_dir: Path, device: str) -> tuple[str, str]:
    """(where transformers is to run, a sentence about it): on the target's device if both its copies fit there.

    Args:
        model_dir: Hugging Face directory.
        device: "cpu" or "cuda", the target's.
    """
    if device == "cpu":
        return "cpu", "transformers runs on the CPU"
    stored = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))  # 2 bytes a parameter, or 4
    need, (free, _) = _COPIES * stored + _ROOM_BYTES, torch.cuda.mem_get_info()
    fits = need <= free
    where = device if fits else "cpu"
    short = "" if fits else ", so it runs on the CPU, slowly"
    return (
        where,
        f"transformers in fp32 and bf16 needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {device}{short}",
    )


@dataclass(frozen=True)
class SlotFinding:
    """Where a captured slot really lies among the N + 1 states.

    error, second_error: root mean square difference to the slot's own reference, and to the nearest other state; each
        dimension in units of its own size, for a few huge dimensions would drown the rest.
    """

    slot: int
    nearest: int
    error: float
    second: int
    second_error: float

    @property
    def share(self) -> float:
        """error as a share of the second-nearest state's."""
        return self.error / self.second_error if self.second_error else float("inf")

    def agrees(self, max_share: float) -> bool:
        return self.nearest == self.slot and self.share <= max_share and self.error <= MAX_SLOT_ERROR

    def describe(self) -> str:
        if self.nearest != self.slot:
            return (
                f"slot {self.slot} of the server is nearest to state {self.nearest} (error {self.second_error:.3f}), "
                f"not to its own (error {self.error:.3f}): wrong layer, wrong order, or captured at another point"
            )
        bound = "" if self.error <= MAX_SLOT_ERROR else f" of its own size (expected at most {MAX_SLOT_ERROR})"
        return f"slot {self.slot}: error {self.error:.4f}{bound}, {self.share:.1%} of that to slot {self.second}"


def find_slots(captured: dict[int, torch.Tensor], reference: Sequence[torch.Tensor]) -> list[SlotFinding]:
    """Looks each captured state up among all states of the reference.

    Args:
        captured: canonical slot -> [n, h].
        reference: N + 1 states [n, h], fp32.
    """
    findings = []
    for slot, state in captured.items():
        own = reference[slot]
        size = own.square().mean(0).sqrt().clamp(min=1e-6)  # [n, h] -> [h]
        errors = [((state.float() - other) / size).square().mean().sqrt().item() for other in reference]
        order = sorted(range(len(errors)), key=errors.__getitem__)
        second = order[1] if order[0] == slot else order[0]
        findings.append(SlotFinding(slot, order[0], errors[slot], second, errors[second]))
    return findings


def trace_slots(trace: RequestTrace, slots: Sequence[int], num_layers: int) -> dict[int, torch.Tensor]:
    """Captured states of a trace by canonical slot, the teacher slot N included."""
    return {slot: trace.states[slot_name(slot)] for slot in slots} | {num_layers: trace.teacher}


@dataclass
class LogitFindings:
    """Teacher logits of the server against transformers in the same dtype, summed over conversations.

    Args:
        independent: the server does not round as transformers does (`agreement_bound`).
        positions: positions compared.
        differ: positions where transformers scores our argmax below its own.
        ties: positions where it scores both the same: bf16 logits are coarse, and either token is its argmax.
        reference_differ: positions where transformers scores the argmax of transformers in fp32 below its own:
            how far rounding alone takes an argmax.
        self_differ: in bf16, positions where transformers scores its argmax with its other attention below its own.
        own_differ: positions where we do.
        largest_gap_ulps: how far, of the positions that differ, the top logit is above ours at most, in bf16 ulps of
            it; the smaller gap of those in bf16 and fp32.
        reference_gap_ulps: how far in fp32 above those of transformers in bf16, with either attention.
        error_sum, reference_error_sum: sums of the root mean square error against fp32, ours and transformers' in bf16.
        served_differ: positions where the server's own argmax is not that of its teacher state (final norm or head).
        tokens_differ: greedy tokens that are not the server's own argmax.
        routed: the target has routed experts.
        gaps: of the positions that differ.
    """

    independent: bool = False
    positions: int = 0
    differ: int = 0
    ties: int = 0
    reference_differ: int = 0
    self_differ: int = 0
    own_differ: int = 0
    largest_gap_ulps: float = 0.0
    reference_gap_ulps: float = 0.0
    error_sum: float = 0.0
    reference_error_sum: float = 0.0
    served_differ: int = 0
    tokens_differ: int = 0
    routed: bool = False
    gaps: list[float] = field(default_factory=list)

    @property
    def tie_ulps(self) -> float:
        """The largest gap of a tie. With routed experts what transformers' own bf16 reaches, if that is more: every
        expert's output is rounded, so that logits may move by more than two ulps."""
        return max(BF16_ULPS_OF_A_TIE, MAX_ERROR_RATIO * self.reference_gap_ulps if self.routed else 0)

    @property
    def beyond_tie(self) -> int:
        """Of `differ`, those with a larger gap."""
        return sum(gap > self.tie_ulps for gap in self.gaps)

    @property
    def share(self) -> float:
        return self.differ / max(self.positions, 1)

    @property
    def reference_share(self) -> float:
        return self.reference_differ / max(self.positions, 1)

    @property
    def own_share(self) -> float:
        return self.own_differ / max(self.positions, 1)

    @property
    def self_share(self) -> float:
        return self.self_differ / max(self.positions, 1)

    def allowed_share(self, asked_share: float) -> float:
        """Of positions where we differ from transformers in bf16: as asked, or as often as it does itself.

        That each is a tie, and that we are as near to fp32, is counted apart.
        """
        counts = self.positions, self.self_differ, self.reference_differ, self.independent
        return allowed_differences(asked_share, *counts) / max(self.positions, 1)

    @property
    def allowed_own_share(self) -> float:
        """Of positions where we differ from fp32: as transformers in bf16, two standard errors aside."""
        error = (self.reference_differ + self.own_differ) ** 0.5
        return max(self.reference_differ + STANDARD_ERRORS * error, MIN_POSITIONS) / max(self.positions, 1)

    @property
    def error_ratio(self) -> float:
        """Our error against fp32 as a multiple of that of transformers in bf16."""
        return self.error_sum / max(self.reference_error_sum, 1e-12)

    def add(self, trace: RequestTrace, prompt_tokens: int, target: TargetModel, reference: Reference) -> None:
        """Counts one greedy trace of `prompt_tokens` prompt tokens."""
        # [n, h] -> [n, V], where the target lies, then where the reference does
        logits = target.logits(trace.teacher.to(target.device)).float().to(reference.logits.device)
        in_bf16 = trace.teacher.dtype == torch.bfloat16
        ours, theirs = logits.argmax(-1), reference.logits_bf16 if in_bf16 else reference.logits
        top = theirs.max(-1).values  # [n]
        gap = top - theirs.gather(1, ours[:, None])[:, 0]
        ulp = torch.exp2(top.abs().clamp(min=1e-30).log2().floor()) * _BF16_STEPS
        differ = gap > 0
        exact = reference.logits.max(-1)
        exact_gap = exact.values - reference.logits.gather(1, ours[:, None])[:, 0]
        gap_ulps = torch.minimum(gap, exact_gap) / ulp  # what transformers' own rounding adds to a gap is not ours
        fp32_gap = top - theirs.gather(1, exact.indices[:, None])[:, 0]
        self.positions += len(ours)
        self.differ += int(differ.sum())
        self.ties += int(((ours != theirs.argmax(-1)) & ~differ).sum())
        self.reference_differ += int((fp32_gap > 0).sum())
        if in_bf16:  # in fp32 the two are one
            eager_gap = top - theirs.gather(1, reference.argmax_eager[:, None])[:, 0]
            self.self_differ += int((eager_gap > 0).sum())
            for theirs_own in (reference.logits_bf16.argmax(-1), reference.argmax_eager):
                above = exact.values - reference.logits.gather(1, theirs_own[:, None])[:, 0]
                self.reference_gap_ulps = max(self.reference_gap_ulps, float((above / ulp).max()))
        own_gap = logits.max(-1).values - logits.gather(1, exact.indices[:, None])[:, 0]
        self.own_differ += int((own_gap > 0).sum())
        self.gaps += gap_ulps[differ].tolist()
        self.largest_gap_ulps = max(self.gaps, default=0.0)
        self.error_sum += (logits - reference.logits).square().mean(-1).sqrt().sum().item()
        self.reference_error_sum += (reference.logits_bf16 - reference.logits).square().mean(-1).sqrt().sum().item()
        ours = ours.cpu()
        self.served_differ += int((ours != trace.target_argmax).sum())
        answer = torch.tensor(trace.token_ids[prompt_tokens:])
        self.tokens_differ += int((answer != trace.target_argmax[prompt_tokens - 1 :]).sum())

    def describe(self) -> str:
        return (
            f"argmax differs from transformers (same dtype) at {self.differ} of {self.positions} positions "
            f"({self.share:.2%}; {self.ties} exact ties aside; from transformers in fp32: ours {self.own_share:.2%}, "
            f"its own bf16 {self.reference_share:.2%}), largest gap {self.largest_gap_ulps:.1f} bf16 ulps; error "
            f"against fp32 {self.error_ratio:.2f} x that of transformers in bf16; greedy tokens that are not the "
            "argmax: "
            f"{self.tokens_differ}"
        )

    def describe_bound(self, asked_share: float) -> str:
        """What was asked, what the reference itself reaches, what we reach."""
        allowed = self.allowed_share(asked_share)
        asked = "reached" if self.share <= asked_share else "NOT reached"
        verdict = "within" if self.share <= allowed else "beyond"
        return (
            f"argmax differs from transformers: asked at most {asked_share:.2%}, {asked}; transformers differs from "
            f"itself at {self.self_share:.2%} (eager attention for sdpa) and {self.reference_share:.2%} (bf16 for "
            f"fp32); ours at {self.share:.2%}, {verdict} the bound of {allowed:.2%}"
        )
