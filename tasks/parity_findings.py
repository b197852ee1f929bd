"""What parity found: every comparison of the served path with what is independent of it, and what failures mean."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.engine.acceptance import AcceptanceCounts, compare
from slipstream.engine.capture import CapturePlan, slot_name
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.expert_choices import choices_of, following, routers
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.runner import capture_states
from slipstream.engine.trace import RequestTrace
from slipstream.tasks.agreement_bound import MAX_ERROR_RATIO
from slipstream.tasks.facts import PARITY
from slipstream.tasks.parity_acceptance import (
    AcceptanceFindings,
    compare_acceptance,
    offline_run_lengths,
    untrained_steps,
)
from slipstream.tasks.parity_capture import CaptureFindings
from slipstream.tasks.parity_causes import Diagnosis, diagnose
from slipstream.tasks.parity_draft import (
    MAX_ERROR_SERVED,
    ROUNDING,
    ROUNDING_FACTOR,
    SERVER,
    DraftFindings,
    compare_drafts,
    in_fp32,
)
from slipstream.tasks.parity_draft_causes import name_draft_cause
from slipstream.tasks.parity_experts import ExpertFindings
from slipstream.tasks.parity_target import (
    LogitFindings,
    SlotFinding,
    TargetReference,
    find_slots,
    trace_slots,
)

TARGET_CONVERSATIONS = 8  # each costs three passes of transformers
MIN_DIFFERING_ROUNDS = 3  # fewer are rounding, however few rounds there are in all
REPEATED = "repeated"  # prompts A, B, A one after the other: only their captures are compared
Progress = Callable[[int, int], None]


def no_progress(_done: int, _total: int) -> None:
    """For callers that show none."""


@dataclass(frozen=True)
class ParityPrompt:
    """A prompt to trace. set: "validation" (held-out conversations), "benchmark", or REPEATED."""

    name: str
    set: str
    token_ids: list[int]
    max_new_tokens: int


class ParityError(SlipstreamError):
    """Comparisons that failed, worst first."""

    exit_code = 3

    def __init__(self, failures: Sequence[str], fault: str = "") -> None:
        super().__init__(
            f"parity failed in {len(failures)} comparisons: " + "; ".join(failures),
            expected="the served path to agree with what is independent of it",
            do="start with the first one: a wrong slot makes the draft's logits and the acceptance wrong, too; "
            f"all figures are in {PARITY} of the stage's folder",
            runbook="accept-length-low.md",
            fault=fault,
        )
        self.failures = list(failures)


@dataclass
class ParityFindings:
    """Everything parity measured; `failures` are the sentences that end the run.

    diagnoses: slot -> what it really is, of the slots that are wrong.
    experts: of a target that has some.
    """

    slots: list[SlotFinding]
    logits: LogitFindings
    drafts: DraftFindings | None
    acceptance: dict[str, AcceptanceFindings]
    capture: CaptureFindings
    diagnoses: dict[int, Diagnosis]
    experts: ExpertFindings | None = None

    def failures(
        self, *, max_slot_share: float, max_argmax_difference: float, max_tau_gap: float, skip: Collection[str] = ()
    ) -> list[str]:
        """What is wrong, worst first in the order of cause: experts, capture, target, draft, acceptance.

        skip: checks that are off ("experts", "slots", "logits", "drafts", "acceptance"); only tests use it.
        """
        found = self.experts.failures() if self.experts and "experts" not in skip else []
        if "slots" not in skip:
            found += self._slot_failures(max_slot_share)
        if "logits" not in skip:
            found += self._logit_failures(max_argmax_difference)
        if self.drafts and "drafts" not in skip:
            served = [f"{name} prompts: {a.describe_conditional()}" for name, a in self.acceptance.items()]
            found += ["; ".join([v, *served]) for name in self.drafts.errors if (v := self.drafts.verdict(name))]
        if "acceptance" not in skip:
            found += self._acceptance_failures(max_tau_gap)
        return found

    @property
    def fault(self) -> str:
        """The fault of the incident that explains what is wrong first; "" where none does."""
        named = [d.cause.fault for d in self.diagnoses.values() if d.explained]
        return named[0] if named else self.drafts.fault if self.drafts else ""

    def _slot_failures(self, max_share: float) -> list[str]:
        found = []
        for s in self.slots:
            rows = self.capture.slots[s.slot]
            if s.agrees(max_share) and not rows.wrong:
                continue
            words = [self.diagnoses[s.slot].describe()] if s.slot in self.diagnoses else []
            words += [] if s.agrees(max_share) else [s.describe()]
            found.append("; ".join([*words, rows.describe()]))
        return found

    def warnings(self, trained_steps: int) -> list[str]:
        """What is no failure and should be known. trained_steps: how far the draft was unrolled in training."""
        if self.drafts is None or self.drafts.wrong(SERVER):
            return []
        counts = AcceptanceCounts(self.drafts.num_steps)
        for acceptance in self.acceptance.values():
            counts.merge(acceptance.served)
        warning = untrained_steps(counts, trained_steps)
        return [*self.drafts.warnings(), *([warning] if warning else [])]

    def _logit_failures(self, max_difference: float) -> list[str]:
        logits, found = self.logits, []
        allowed = logits.allowed_share(max_difference)
        if logits.share > allowed or logits.beyond_tie:
            found.append(
                f"teacher logits: {logits.describe()}; {logits.describe_bound(max_difference)}, each at a gap of at "
                f"most {logits.tie_ulps:.2g} ulps"
            )
        if logits.own_share > logits.allowed_own_share:
            found.append(
                f"teacher logits: the argmax is not that of transformers in fp32 at {logits.own_share:.2%} of the "
                f"positions, that of transformers in bf16 at {logits.reference_share:.2%} (ours at most "
                f"{logits.allowed_own_share:.2%})"
            )
        if logits.error_ratio > MAX_ERROR_RATIO:
            found.append(
                f"teacher logits: error against fp32 is {logits.error_ratio:.2f} x that of transformers in bf16 "
                f"(at most {MAX_ERROR_RATIO})"
            )
        if logits.served_differ or logits.tokens_differ:
            found.append(
                f"the server's argmax differs from that of its own teacher state at {logits.served_differ} positions, "
                f"its greedy tokens from its argmax at {logits.tokens_differ}: final norm, head or sampling"
            )
        return found

    def _acceptance_failures(self, max_gap: float) -> list[str]:
        found = []
        for name, acceptance in self.acceptance.items():
            if not (acceptance.offline.rounds and acceptance.served.rounds):
                continue
            result = compare(acceptance.offline, acceptance.served, max_gap=max_gap)
            if not result.agrees and acceptance.differing_rounds >= MIN_DIFFERING_ROUNDS:
                first = f"; first: {acceptance.first.describe()}" if acceptance.first else ""
                found.append(
                    f"acceptance on the {name} prompts, offline against served: {result.describe()}\n"
                    f"  {acceptance.describe_conditional()}{first}"
                )
        return found

    def describe(self, max_argmax_difference: float) -> list[str]:
        """A line for each comparison, for the person watching. max_argmax_difference: what the deployment asks for."""
        lines = [f"{s.describe()}; {self.capture.slots[s.slot].describe()}" for s in self.slots]
        lines += [f"teacher: {self.logits.describe()}", f"teacher: {self.logits.describe_bound(max_argmax_difference)}"]
        lines += [f"experts: {self.experts.describe()}"] if self.experts else []
        lines.append(self.capture.describe_tokens())
        if self.drafts:
            for name, errors in self.drafts.errors.items():
                steps = "; ".join(f"k={k} {e.describe()}" for k, e in enumerate(errors, start=1) if e.rounds)
                lines.append(f"draft logits, {name} against the reference, error (rounds): {steps}")
        for name, a in self.acceptance.items():
            lines.append(
                f"acceptance on {name} prompts: offline {a.offline.accept_length:.3f}, served "
                f"{a.served.accept_length:.3f}; {a.describe_conditional()}; "
                f"{a.differing_rounds} of {a.rounds} rounds differ"
                + (f"; first: {a.first.describe()}" if a.first else "")
            )
        return lines

    def summary(self) -> dict[str, Any]:
        """The figures of the stage's manifest."""
        worst = max(self.slots, key=lambda s: s.share, default=None)
        return {
            "largest_slot_share": worst.share if worst else None,
            "argmax_difference": self.logits.share,
            "positions": self.logits.positions,
            "error_ratio": self.logits.error_ratio,
            "wrong_rows": sum(rows.wrong for rows in self.capture.slots.values()),
            "tokens": self.capture.tokens,
            "tokens_differ": self.capture.tokens_differ,
            "draft_error": {n: max(e.error for e in es) for n, es in self.drafts.errors.items()} if self.drafts else {},
            "accept_length": {
                name: {"offline": a.offline.accept_length, "served": a.served.accept_length}
                for name, a in self.acceptance.items()
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        drafts = {}
        if self.drafts:
            drafts = {
                name: [{"step": k, **e.to_dict()} for k, e in enumerate(errors, start=1)]
                for name, errors in self.drafts.errors.items()
            }
        return {
            "slots": [asdict(s) | {"share": s.share} for s in self.slots],
            "rows": [
                {
                    "slot": rows.slot,
                    "prompt_rows": rows.prompt_rows,
                    "round_rows": rows.round_rows,
                    "first_wrong": rows.first,
                    "diagnosis": asdict(self.diagnoses[rows.slot]) if rows.slot in self.diagnoses else None,
                }
                for rows in self.capture.slots.values()
            ],
            "tokens": {
                "compared": self.capture.tokens,
                "differ": self.capture.tokens_differ,
            },
            "logits": asdict(self.logits)
            | {
                "share": self.logits.share,
                "reference_share": self.logits.reference_share,
                "own_share": self.logits.own_share,
                "self_share": self.logits.self_share,
                "error_ratio": self.logits.error_ratio,
                "beyond_tie": self.logits.beyond_tie,
            },
            "experts": asdict(self.experts) if self.experts else None,
            "drafts": drafts,
            "acceptance": {
                name: {
                    "offline": a.offline.to_dict(),
                    "served": a.served.to_dict(),
                    "rounds": a.rounds,
                    "differing_rounds": a.differing_rounds,
                    "first_disagreement": asdict(a.first) if a.first else None,
                }
                for name, a in self.acceptance.items()
            },
        }


def examine(
    prompts: Sequence[ParityPrompt],
    traces: Sequence[RequestTrace],
    target: Decoder,
    reference: TargetReference,
    networks: Mapping[str, Eagle3Network],
    slots: tuple[int, ...],
    num_steps: int,
    progress: Progress = no_progress,
    num_ranks: int = 1,
    plain: Sequence[torch.Tensor] | None = None,
) -> ParityFindings:
    """Compares traces with everything that is independent of the server.

    Args:
        prompts, traces: what was asked and what the server recorded, in the same order.
        target: loaded by our own loader, for the offline capture.
        reference: transformers on the same directory.
        networks: "export" and "trainer"; empty without a draft.
        slots: in the order that the draft reads them.
        num_steps: K of the server.
        progress: called with (done, total).
        num_ranks: of the server.
        plain: the target's most likely token behind each position, [n] a trace, by a server that drafts nothing; None
            has it computed by the target in this process, which is the same bits where one rank serves.
    """
    num_layers = target.config.num_layers
    plan = CapturePlan(slots, num_layers)
    routed = target.config.experts is not None
    logits = LogitFindings(num_ranks > 1 or target.device.type != "cpu" or routed, routed=routed)
    captured: dict[int, list[torch.Tensor]] = {}
    wanted: list[list[torch.Tensor]] = [[] for _ in range(num_layers + 1)]
    drafts = DraftFindings(num_steps) if networks and num_steps else None
    exact = {name: in_fp32(network) for name, network in networks.items()}
    acceptance: dict[str, AcceptanceFindings] = {}
    capture = CaptureFindings(expands=target.config.latent is not None and target.device.type == "cpu")
    experts = ExpertFindings(logits.independent) if routed else None
    drafted: list[tuple[RequestTrace, torch.Tensor]] = []
    for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        choices = _choices(prompt, trace, target)
        if number < TARGET_CONVERSATIONS:
            expected = reference.run(trace.token_ids[:-1], choices).cpu()  # to where traces and target are
            if experts and expected.experts:
                experts.add(prompt.name, choices, expected.experts, trace.teacher.dtype == torch.bfloat16)
            logits.add(trace, len(prompt.token_ids), target, expected)
            for slot, state in trace_slots(trace, slots, num_layers).items():
                captured.setdefault(slot, []).append(state)
            for k, state in enumerate(expected.states):
                wanted[k].append(state)
            if drafts:
                drafted.append((trace, plan.select(trace.states)))
                compare_drafts(drafts, trace, exact, networks["export"], drafted[-1][1])
        with following(target, choices):
            eager = _add_capture(capture, prompt, trace, target, plan, plain[number] if plain else None)
        if drafts and prompt.set != REPEATED:
            _add_acceptance(acceptance, prompt, trace, networks["export"], plan.select(eager), num_steps)
        progress(number + 1, len(prompts))
    states = {slot: torch.cat(parts) for slot, parts in captured.items()}
    found = find_slots(states, [torch.cat(parts) for parts in wanted]) if states else []
    if drafts and (wrong := drafts.wrong(SERVER)):
        bound = max(MAX_ERROR_SERVED, ROUNDING_FACTOR * drafts.errors[ROUNDING][wrong[0] - 1].error)
        drafts.cause = name_draft_cause(exact["export"], drafted, wrong[0], num_steps, bound)
    named = {slot: diagnose(target, rows, slots, num_ranks) for slot, rows in capture.slots.items() if rows.wrong}
    return ParityFindings(found, logits, drafts, acceptance, capture, {s: d for s, d in named.items() if d}, experts)


def _choices(prompt: ParityPrompt, trace: RequestTrace, target: Decoder) -> dict[int, torch.Tensor]:
    """Where the server sent each row, by layer. Raises SlipstreamError where it does not say."""
    choices, layers = choices_of(trace.states), set(routers(target))
    if set(choices) != layers:
        raise SlipstreamError(
            f"the trace of {prompt.name} has experts of {len(choices)} layers",
            expected=f"those of the {len(layers)} layers of the target that have some",
            do="start the server with --diagnostics, of this very version",
        )
    return choices


def _add_capture(
    capture: CaptureFindings,
    prompt: ParityPrompt,
    trace: RequestTrace,
    target: Decoder,
    plan: CapturePlan,
    plain: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Adds one conversation to the findings of the capture. Returns its eager states, slot name -> [n, h]."""
    prompt_tokens = len(prompt.token_ids)
    eager, teacher = capture_states(target, trace.token_ids[:-1], plan.slots)
    by_slot = {slot: eager[slot_name(slot)] for slot in plan.slots} | {plan.teacher: teacher}
    served = trace_slots(trace, plan.slots, plan.teacher)
    capture.add(prompt.name, prompt_tokens, trace, served, by_slot)
    if plain is None:
        with torch.inference_mode():
            plain = target.logits(teacher).max(dim=-1).indices  # [n, h] -> [n]
    capture.add_tokens(torch.tensor(trace.token_ids[prompt_tokens:]), plain[prompt_tokens - 1 :])
    return eager


def _add_acceptance(
    acceptance: dict[str, AcceptanceFindings],
    prompt: ParityPrompt,
    trace: RequestTrace,
    network: Eagle3Network,
    features: torch.Tensor,
    num_steps: int,
) -> None:
    """Adds one conversation to the findings of its set; features [n, F]: its states, captured offline anew."""
    tokens = torch.tensor(trace.token_ids)
    runs = offline_run_lengths(network, tokens, features, len(prompt.token_ids), num_steps)
    empty = AcceptanceFindings(AcceptanceCounts(num_steps), AcceptanceCounts(num_steps))
    by_limit = len(tokens) - len(prompt.token_ids) >= prompt.max_new_tokens
    compare_acceptance(
        acceptance.setdefault(prompt.set, empty), prompt.name, trace, len(prompt.token_ids), runs, by_limit
    )
