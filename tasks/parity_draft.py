"""Parity of the draft: logits of server, exported checkpoint and trainer against the independent reference.

Trainer and export are held to it in fp32, where they must agree closely; the server computes in its own dtype,
and is allowed what rounding alone does to the same network there, or a little.

The reference and the trainer run the whole conversation at once, without any cache; the server drafted it round by
round with its draft KV. So equality also says that decoding a chain with the draft's KV equals decoding it without.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from slipstream.engine.drafts.eagle3.checkpoint import to_tensors
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.trace import RequestTrace, RoundTrace
from slipstream.engine.training.data import Batch
from slipstream.engine.training.unroll import unrolled_states
from slipstream.tests.reference_eagle3 import step_logits

MAX_ERROR_FP32 = 0.005
MAX_ERROR_SERVED = 0.05
SERVER = "server"
ROUNDING = "rounding alone"  # the exported network in the served dtype: what the server's error is measured by
ROUNDING_FACTOR = 2.0  # attention in another order rounds otherwise
CHAIN_ROUNDS = 6  # rounds a conversation whose own, later rejected drafts the reference follows; a pass each


@dataclass
class StepError:
    """Draft logits at one step, summed over rounds.

    squared, squared_reference: sums of squares of (logits - reference's) and of (reference's - their mean).
    argmax_differs: rounds whose most likely draft token is another.
    """

    rounds: int = 0
    squared: float = 0.0
    squared_reference: float = 0.0
    argmax_differs: int = 0

    @property
    def error(self) -> float:
        """Root mean square error as a share of the logits' spread."""
        return (self.squared / self.squared_reference) ** 0.5 if self.squared_reference else 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor) -> None:
        """logits, reference [r, Vd]."""
        reference, logits = reference.float(), logits.float()
        self.rounds += len(logits)
        self.squared += (logits - reference).square().sum().item()
        self.squared_reference += (reference - reference.mean(-1, keepdim=True)).square().sum().item()
        self.argmax_differs += int((logits.argmax(-1) != reference.argmax(-1)).sum())


@dataclass
class DraftFindings:
    """For each implementation (server, export, trainer, rounding alone) the error at steps 1..K.

    first_rounds: the server's step 1 in the first round of each request, before which no chain has run. cause: what
    the server's wrong logits really are, where that is known.
    """

    num_steps: int
    errors: dict[str, list[StepError]] = field(default_factory=dict)
    first_rounds: StepError = field(default_factory=StepError)
    cause: str = ""

    def add(self, name: str, step: int, logits: torch.Tensor, reference: torch.Tensor) -> None:
        if len(logits):
            self.errors.setdefault(name, [StepError() for _ in range(self.num_steps)])[step - 1].add(logits, reference)

    def bound(self, name: str, step: int) -> float:
        """Largest error of `name` at `step`."""
        if name != SERVER:
            return MAX_ERROR_FP32
        rounding = self.errors[ROUNDING][step - 1].error if ROUNDING in self.errors else 0.0
        return max(MAX_ERROR_SERVED, ROUNDING_FACTOR * rounding)

    def wrong(self, name: str) -> list[int]:
        """Steps of `name` whose error is too large."""
        if name == ROUNDING:
            return []
        return [k for k, e in enumerate(self.errors.get(name, []), start=1) if e.error > self.bound(name, k)]

    def verdict(self, name: str) -> str:
        """What a wrong step means, "" when all are right."""
        wrong = self.wrong(name)
        if not wrong:
            return ""
        errors = ", ".join(
            f"k={k}: {self.errors[name][k - 1].error:.3f}, expected at most {self.bound(name, k):.3f}" for k in wrong
        )
        cause = self.cause if name == SERVER else ""
        if 1 in wrong and name == SERVER and self.only_later_rounds:
            return (
                f"{name}: the first round of each request is right (error {self.first_rounds.error:.4f}), the first "
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
        first = self.first_rounds
        return bool(first.rounds) and first.error <= self.bound(SERVER, 1)

    @property
    def fault(self) -> str:
        """Of the incident, where the server's drafts are wrong: F19 is right at first and wrong from then on."""
        wrong = self.wrong(SERVER)
        if not wrong:
            return ""
        return "F19" if 1 not in wrong or self.only_later_rounds else "F3" if "fc reads" in self.cause else ""


def in_fp32(network: Eagle3Network) -> Eagle3Network:
    """The same weights in a network of fp32, made anew so that its tables (rope) are fp32 from the start."""
    exact = Eagle3Network(network.config, torch.float32)
    exact.load_state_dict(network.state_dict())  # copies into the parameters' own dtype
    return exact


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
    num_steps = findings.num_steps
    tokens = torch.tensor(trace.token_ids)  # [n + 1]
    export = networks["export"]
    weights = {name: tensor.float() for name, tensor in to_tensors(export).items() if name not in ("d2t", "t2d")}
    with torch.no_grad():
        reference = step_logits(weights, export.config, tokens, features.float(), num_steps)  # [K, n, Vd]
        unrolled = {name: unrolled_logits(n, tokens, features.float(), num_steps) for name, n in networks.items()}
        unrolled[ROUNDING] = unrolled_logits(served, tokens, features, num_steps)
    for step in range(1, num_steps + 1):
        rounds, drafted_from = zip(*found, strict=True) if (found := comparable_rounds(trace, step)) else ((), ())
        slots = torch.tensor(drafted_from, dtype=torch.int64)
        wanted = reference[step - 1, slots]  # [n, Vd] -> [r, Vd]
        for name, logits in unrolled.items():
            findings.add(name, step, logits[step - 1, slots], wanted)
        drafted = [r.draft_logits[step - 1] for r in rounds if r.draft_logits is not None]
        if drafted:
            findings.add(SERVER, step, torch.stack(drafted), wanted)
        if drafted and step == 1 and rounds[0] is trace.rounds[0]:
            findings.first_rounds.add(drafted[0][None], wanted[:1])
    for served_round in trace.rounds[:CHAIN_ROUNDS]:
        if served_round.draft_logits is None:
            continue
        with torch.no_grad():
            chain_tokens, chain_features = own_chain(tokens, features, served_round)
            slot = served_round.start - 2
            chain = step_logits(weights, export.config, chain_tokens, chain_features.float(), num_steps)[
                :, slot
            ]  # [K, Vd]
            rounded = unrolled_logits(served, chain_tokens, chain_features, num_steps)[:, slot]  # [K, Vd]
        for step in range(1, served_round.num_valid + 1):
            if not _comparable(served_round.start, served_round.accepted, served_round.num_valid, step, len(tokens)):
                findings.add(SERVER, step, served_round.draft_logits[step - 1 : step], chain[step - 1 : step])
                findings.add(ROUNDING, step, rounded[step - 1 : step], chain[step - 1 : step])


def own_chain(tokens: torch.Tensor, features: torch.Tensor, served: RoundTrace) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [start + K] and features [start + K - 1, F] of a round that fed itself its own drafts, right or wrong."""
    chain = torch.cat((tokens[: served.start], served.draft_tokens))
    known = features[: served.start - 1]  # of slots 0..start - 2; later slots are not seen from there
    padding = known.new_zeros(len(chain) - 1 - len(known), known.shape[1])
    return chain, torch.cat((known, padding))


def comparable_rounds(trace: RequestTrace, step: int) -> list[tuple[RoundTrace, int]]:
    """Rounds whose chain fed itself committed tokens before `step`, each with the slot that it drafts from."""
    count = len(trace.token_ids)
    return [(r, r.start - 2) for r in trace.rounds if _comparable(r.start, r.accepted, r.num_valid, step, count)]


def _comparable(start: int, accepted: int, num_valid: int, step: int, num_tokens: int) -> bool:
    """Whether the tokens that the chain fed itself before `step` are the committed ones, which all others saw."""
    return accepted >= step - 1 and step <= num_valid and start - 2 + step < num_tokens


def unrolled_logits(
    network: Eagle3Network, tokens: torch.Tensor, features: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """The trainer's own pass over one conversation: [K, n, Vd] at every slot."""
    slots = len(features)
    states = unrolled_states(network, whole_conversation(tokens, features, num_steps), num_steps)
    return torch.stack([network.logits(state[0]) for state in _first(states, num_steps)]).reshape(num_steps, slots, -1)


def _first(states: Iterator[torch.Tensor], count: int) -> list[torch.Tensor]:
    return [next(states) for _ in range(count)]


def whole_conversation(tokens: torch.Tensor, features: torch.Tensor, num_steps: int) -> Batch:
    """A batch of one conversation with every slot as a row. tokens [n + 1], features [n, F]."""
    slots = len(features)
    empty = torch.zeros(num_steps, 1, slots, dtype=torch.int64)
    return Batch(
        tokens=tokens[None],
        features=features[None],
        slots=torch.arange(slots)[None],
        supervised=torch.ones(num_steps, 1, slots, dtype=torch.bool),
        rows=(torch.arange(slots),) * num_steps,
        teacher=features.new_zeros(1, 1),
        teacher_rows=empty,
    )
