"""Parity of the draft: logits of server, exported checkpoint and trainer against the independent reference.

Trainer and export are held to it in fp32, where they must agree closely; the server computes in its own dtype, and
each of its rounds is allowed what rounding alone does to that round (parity_rounding.py), or a little.

The reference and the trainer run the whole conversation at once, without any cache; the server drafted it round by
round with its draft KV. So equality also says that decoding a chain with the draft's KV equals decoding it without.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slipstream.engine.drafts.eagle3.checkpoint import to_tensors
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.trace import RequestTrace, RoundTrace
from slipstream.tasks.parity_rounding import relative_errors, rounding_errors, unrolled_logits
from slipstream.tests.reference_eagle3 import step_logits

MAX_ERROR_FP32 = 0.005
MAX_ERROR_SERVED = 0.05  # a round that is as near as this is right, and is not looked at further
ROUNDING_FACTOR = 3.0  # times the worst of a round's samples
# That are a fault. One alone may be rounding that no sample met: a number on the edge between two places takes another
# state with it in one round of ten, and by more than the factor in one round of 10^5 or fewer.
MIN_WRONG_ROUNDS = 2
HIDES_FAULTS = 0.5  # a round with a bound above it shows few faults
SERVER = "server"
ROUNDING = "rounding alone"  # the exported network in the served dtype
CHAIN_ROUNDS = 6  # rounds a conversation whose own, later rejected drafts the reference follows; a pass each
FIRST, REJECTED, ACCEPTED = "the first of a request", "after a rejection", "after a chain accepted whole"


@dataclass(frozen=True)
class RoundError:
    """Draft logits of one round at one step.

    error: their distance from the reference's, as a share of the spread of these. bound: the largest right one.
    kind: FIRST, REJECTED or ACCEPTED. position: of the token that the chain's first draft proposes. context: the same
    for rounds behind the same tokens, which are the same rounds once more.
    """

    error: float
    bound: float
    kind: str
    position: int
    argmax_differs: bool
    context: int = 0

    @property
    def wrong(self) -> bool:
        return not self.error <= self.bound  # so that NaN is wrong, too


@dataclass
class StepErrors:
    """All rounds of one step."""

    found: list[RoundError] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.found)

    @property
    def error(self) -> float:
        """Of the round in the middle."""
        return statistics.median(r.error for r in self.found) if self.found else 0.0

    @property
    def worst(self) -> RoundError:
        """The round that is farthest over its bound, or nearest to it."""
        return max(self.found, key=lambda r: (r.wrong, r.error / r.bound))

    @property
    def wrong(self) -> list[RoundError]:
        return [r for r in self.found if r.wrong]

    @property
    def hiding(self) -> int:
        """Rounds that magnify rounding so far that a fault could hide in them."""
        return sum(r.bound > HIDES_FAULTS for r in self.found if not math.isinf(r.bound))

    @property
    def argmax_differs(self) -> int:
        """Rounds whose most likely draft token is another."""
        return sum(r.argmax_differs for r in self.found)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"rounds": self.rounds, "error": self.error, "argmax_differs": self.argmax_differs}
        if not self.rounds:
            return found
        worst = asdict(self.worst) | {"bound": None if math.isinf(self.worst.bound) else self.worst.bound}
        return found | {"wrong": len(self.wrong), "worst": worst}

    def describe(self) -> str:
        """Found and asked, in short."""
        text = f"{self.error:.4f} ({self.rounds})"
        return (
            text if self.worst.bound == math.inf else f"{text}, worst {self.worst.error:.4f} of {self.worst.bound:.4f}"
        )

    def describe_wrong(self) -> str:
        """How many rounds are wrong, of which kind, and the worst."""
        of, wrong, worst = Counter(r.kind for r in self.found), Counter(r.kind for r in self.wrong), self.worst
        kinds = ", ".join(f"{kind}: {wrong[kind]} of {of[kind]}" for kind in (FIRST, REJECTED, ACCEPTED) if of[kind])
        return (
            f"{self.error:.3f} in the middle, {len(self.wrong)} of {self.rounds} rounds beyond rounding ({kinds}), "
            f"worst {worst.error:.3f} at position {worst.position}, expected at most {worst.bound:.3f}"
        )


@dataclass
class DraftFindings:
    """For each implementation (server, export, trainer, rounding alone) the errors at steps 1..K.

    cause: what the server's wrong logits really are, where that is known.
    """

    num_steps: int
    errors: dict[str, list[StepErrors]] = field(default_factory=dict)
    cause: str = ""

    def add(self, name: str, step: int, found: RoundError) -> None:
        self.errors.setdefault(name, [StepErrors() for _ in range(self.num_steps)])[step - 1].found.append(found)

    def wrong(self, name: str) -> list[int]:
        """Steps of `name` with a round whose error is too large; of the server, where it is not one round alone."""
        if name == SERVER and len(self._wrong_contexts) < MIN_WRONG_ROUNDS:
            return []
        return [k for k, e in enumerate(self.errors.get(name, []), start=1) if e.wrong]

    @property
    def _wrong_contexts(self) -> set[int]:
        """Of the server's wrong rounds, whatever the step."""
        return {r.context for e in self.errors.get(SERVER, []) for r in e.wrong}

    def verdict(self, name: str) -> str:
        """What a wrong step means, "" when all are right."""
        wrong = self.wrong(name)
        if not wrong:
            return ""
        errors = "; ".join(f"k={k}: {self.errors[name][k - 1].describe_wrong()}" for k in wrong)
        cause = self.cause if name == SERVER else ""
        if 1 in wrong and name == SERVER and self.only_later_rounds:
            first = statistics.median(r.error for r in self._first_rounds)
            return (
                f"{name}: the first round of each request is right (error {first:.4f}), the first "
                f"step of later rounds is wrong ({errors}): the draft's KV after a rejection; fix: make the keys of "
                "committed slots again from the target's states, over those that the chain left"
            )
        if 1 in wrong:
            return f"{name}: the first step is wrong ({errors}): " + (
                cause or "the features, the token beside them or the weights differ from training"
            )
        return f"{name}: the first step is right, later steps are wrong ({errors}): " + (
            cause or "the fed-back state (before or after the norm), the rope positions, or the draft's KV"
        )

    @property
    def only_later_rounds(self) -> bool:
        """Step 1 is right in the rounds before which no chain has run, and only there."""
        first = self._first_rounds
        return bool(first) and not any(r.wrong for r in first)

    @property
    def _first_rounds(self) -> list[RoundError]:
        return [r for r in self.errors[SERVER][0].found if r.kind == FIRST] if SERVER in self.errors else []

    @property
    def fault(self) -> str:
        """Of the incident, where the server's drafts are wrong: F19 is right at first and wrong from then on."""
        wrong = self.wrong(SERVER)
        if not wrong:
            return ""
        return "F19" if 1 not in wrong or self.only_later_rounds else "F3" if "fc reads" in self.cause else ""

    def warnings(self) -> list[str]:
        """What is no failure, and should be known."""
        found = []
        for k, e in enumerate(self.errors.get(SERVER, []), start=1):
            if e.wrong and not self.wrong(SERVER):
                found.append(
                    f"draft logits at k = {k}: {e.describe_wrong()}; a single round is no failure: rounding may do it"
                )
            if 2 * e.hiding > e.rounds:
                found.append(
                    f"draft logits at k = {k}: {e.hiding} of {e.rounds} rounds magnify the rounding of {SERVER} so far "
                    f"that a fault could hide in them (bound over {HIDES_FAULTS:g} of the logits' spread), as a draft "
                    "does that is hardly trained: train longer"
                )
        return found


def in_fp32(network: Eagle3Network) -> Eagle3Network:
    """The same weights in a network of fp32, made anew so that its tables (rope) are fp32 from the start."""
    exact = Eagle3Network(network.config, torch.float32)
    exact.load_state_dict(network.state_dict())  # copies into the parameters' own dtype
    return exact


@dataclass(frozen=True)
class _Compared:
    """Rounds that drafted from one text, and the steps of each that it is right for.

    Args:
        tokens: [n + 1] int64.
        features: [n, F], the served states in the order that the draft reads them.
        rounds: of the server, each with its kind and steps.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    rounds: Sequence[tuple[RoundTrace, str, Sequence[int]]]


def compare_drafts(
    findings: DraftFindings,
    trace: RequestTrace,
    networks: Mapping[str, Eagle3Network],
    served: Eagle3Network,
    features: torch.Tensor,
) -> None:
    """Adds one conversation.

    Args:
        findings: to add to.
        trace: of a served request.
        networks: in fp32, "export" and others to run beside the server; the reference takes its weights from "export".
        served: the exported network in the server's dtype.
        features: [n, F], the served states in the order that the draft reads them.
    """
    tokens = torch.tensor(trace.token_ids)  # [n + 1]
    committed: list[tuple[RoundTrace, str, Sequence[int]]] = []
    own: list[tuple[RoundTrace, str, Sequence[int]]] = []
    for number, (drafted, kind) in enumerate(zip(trace.rounds, kinds_of(trace.rounds), strict=True)):
        if drafted.draft_logits is None:
            continue
        steps = list(range(1, drafted.num_valid + 1))
        right = [k for k in steps if _comparable(drafted, k, len(tokens))]
        fed_by_itself = [k for k in steps if k not in right]
        committed.append((drafted, kind, right))
        if number < CHAIN_ROUNDS and fed_by_itself:
            own.append((drafted, kind, fed_by_itself))
    if committed:
        _compare(findings, _Compared(tokens, features, committed), networks["export"], networks, served)
    for one in own:
        chain = own_chain(tokens, features, one[0])
        _compare(findings, _Compared(*chain, [one]), networks["export"], {}, served)


def _compare(
    findings: DraftFindings,
    compared: _Compared,
    export: Eagle3Network,
    networks: Mapping[str, Eagle3Network],
    served: Eagle3Network,
) -> None:
    """Adds these rounds of the server, of `networks`, and what rounding alone does to them."""
    tokens, features, num_steps = compared.tokens, compared.features, findings.num_steps
    slots = torch.tensor([r.start - 2 for r, _, _ in compared.rounds])  # [r]
    weights = {name: tensor.float() for name, tensor in to_tensors(export).items() if name not in ("d2t", "t2d")}
    asked = torch.zeros(num_steps, len(slots), dtype=torch.bool)  # [K, r]
    for column, (_, _, steps) in enumerate(compared.rounds):
        asked[[k - 1 for k in steps], column] = True
    with torch.no_grad():
        reference = step_logits(weights, export.config, tokens, features.float(), num_steps)[:, slots]  # [K, r, Vd]
        logits = {name: unrolled_logits(n, tokens, features.float(), num_steps, slots) for name, n in networks.items()}
        logits[ROUNDING] = unrolled_logits(served, tokens, features, num_steps, slots)
        drafted = [r.draft_logits for r, _, _ in compared.rounds if r.draft_logits is not None]  # r x [K, Vd]
        logits[SERVER] = torch.stack(drafted, 1)  # [K, r, Vd]
        errors = {name: relative_errors(found, reference) for name, found in logits.items()}  # [K, r] each
        flat = {**dict.fromkeys(networks, MAX_ERROR_FP32), ROUNDING: math.inf, SERVER: MAX_ERROR_SERVED}
        bounds = {name: torch.full(asked.shape, bound, dtype=torch.float64) for name, bound in flat.items()}
        if (asked & ~(errors[SERVER] <= MAX_ERROR_SERVED)).any():
            samples = rounding_errors(served, tokens, features, slots, reference)  # [SAMPLES, K, r]
            rounding = torch.maximum(samples.amax(0), errors[ROUNDING])
            bounds[SERVER] = (ROUNDING_FACTOR * rounding.double()).clamp(min=MAX_ERROR_SERVED)
    chosen = reference.argmax(-1)
    contexts = [hash(tuple(tokens[: r.start].tolist())) for r, _, _ in compared.rounds]
    for name, found in logits.items():
        differs = found.argmax(-1) != chosen  # [K, r]
        for column, (one, kind, steps) in enumerate(compared.rounds):
            for k in steps:
                at = k - 1, column
                error, bound = errors[name][at].item(), bounds[name][at].item()
                findings.add(name, k, RoundError(error, bound, kind, one.start, bool(differs[at]), contexts[column]))


def kinds_of(rounds: Sequence[RoundTrace]) -> list[str]:
    """FIRST, REJECTED or ACCEPTED of each round of a request, by what the one before it left in the draft's KV."""
    return [FIRST, *(REJECTED if r.accepted < r.num_valid else ACCEPTED for r in rounds[:-1])] if rounds else []


def own_chain(tokens: torch.Tensor, features: torch.Tensor, served: RoundTrace) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [start + K] and features [start + K - 1, F] of a round that fed itself its own drafts, right or wrong."""
    chain = torch.cat((tokens[: served.start], served.draft_tokens))
    known = features[: served.start - 1]  # of slots 0..start - 2; later slots are not seen from there
    padding = known.new_zeros(len(chain) - 1 - len(known), known.shape[1])
    return chain, torch.cat((known, padding))


def comparable_rounds(trace: RequestTrace, step: int) -> list[tuple[RoundTrace, int]]:
    """Rounds whose chain fed itself committed tokens before `step`, each with the slot that it drafts from."""
    count = len(trace.token_ids)
    return [(r, r.start - 2) for r in trace.rounds if _comparable(r, step, count)]


def _comparable(served: RoundTrace, step: int, num_tokens: int) -> bool:
    """Whether the tokens that the chain fed itself before `step` are the committed ones, which all others saw."""
    return served.accepted >= step - 1 and step <= served.num_valid and served.start - 2 + step < num_tokens
