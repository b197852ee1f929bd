"""Parity of acceptance: what the trainer's code expects on served conversations, against what the server accepted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.acceptance import AcceptanceCounts, ConversationRuns, run_lengths_to_tau
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.trace import RequestTrace
from slipstream.engine.training.unroll import unrolled_states
from slipstream.tasks.parity_rounding import whole_conversation

MIN_ROUNDS = 30  # that reached a step, before its conditional acceptance is judged
FALLEN = 0.6  # of that at the first step; a draft trained on its own states loses little from step to step
MAX_DEVIATION = 3.0  # standard errors


@dataclass(frozen=True)
class Disagreement:
    """The first round of which offline and served acceptance differ."""

    conversation: str
    round: int
    position: int
    offline: int
    served: int

    def describe(self) -> str:
        return (
            f"{self.conversation}, round {self.round} (position {self.position}): offline accepts {self.offline} "
            f"drafts, the server accepted {self.served}; look at draft step {min(self.offline, self.served) + 1}"
        )


@dataclass
class AcceptanceFindings:
    """Acceptance of one set of prompts, offline and served, and where they first part."""

    offline: AcceptanceCounts
    served: AcceptanceCounts
    rounds: int = 0
    differing_rounds: int = 0
    first: Disagreement | None = None

    def describe_conditional(self) -> str:
        """A_k / A_(k-1) at every step, offline and served: where it falls, the chain goes wrong."""
        offline, served = (
            ", ".join("-" if math.isnan(a) else f"{a:.2f}" for a in counts.conditional)
            for counts in (self.offline, self.served)
        )
        return f"A_k / A_(k-1) for k = 1.. offline {offline}; served {served}"


def untrained_steps(counts: AcceptanceCounts, trained_steps: int) -> str:
    """A warning where conditional acceptance falls off after the first step although all logits agree; "" where not.

    Args:
        counts: served.
        trained_steps: how many steps the draft was unrolled in training.
    """
    reached = [sum(counts.histogram[k:]) for k in range(counts.num_steps + 1)]
    if counts.num_steps < 2 or not reached[1]:
        return ""
    first = reached[1] / reached[0]
    for k in range(2, counts.num_steps + 1):
        if reached[k - 1] < MIN_ROUNDS:
            break
        rate, deviation = reached[k] / reached[k - 1], math.sqrt(first * (1 - first) / reached[k - 1])
        if rate < FALLEN * first and first - rate > MAX_DEVIATION * deviation:
            trained = f"it was trained to run {trained_steps} {'step' if trained_steps == 1 else 'steps'}"
            return (
                f"F19: the draft's logits are those of training at every step, but conditional acceptance falls from "
                f"{first:.2f} at k = 1 ({reached[1]} of {reached[0]} rounds) to {rate:.2f} at k = {k} ({reached[k]} of "
                f"{reached[k - 1]}): {trained} on its own states, and runs {counts.num_steps}; train with "
                f"training.num_steps: {counts.num_steps}, or serve speculation.num_steps: {k - 1}"
            )
    return ""


def offline_run_lengths(
    network: Eagle3Network, tokens: torch.Tensor, features: torch.Tensor, prompt_tokens: int, num_steps: int
) -> list[int]:
    """Run length of accepted greedy drafts at each slot from the first that serving drafts from.

    Args:
        network: the draft.
        tokens: [n + 1], prompt and answer of a greedy run.
        features: [n, F] of these tokens.
        prompt_tokens: P; the first entry belongs to slot P - 1.
        num_steps: K.

    Returns:
        n - P entries: slot t = P - 1 + i predicts token t + 2.
    """
    alive = torch.ones(len(features), dtype=torch.bool)
    lengths = torch.zeros(len(features), dtype=torch.int64)
    padded = torch.cat((tokens, tokens.new_full((num_steps + 1,), -1)))
    with torch.no_grad():
        for step, state in enumerate(
            unrolled_states(network, whole_conversation(tokens, features, num_steps), num_steps), start=1
        ):
            drafts = network.to_target(network.logits(state[0]).argmax(-1))  # [n]
            alive &= drafts == padded[1 + step : 1 + step + len(features)]  # x_{t+1+k}
            lengths += alive
    return lengths[prompt_tokens - 1 : len(tokens) - 2].tolist()


def compare_acceptance(
    findings: AcceptanceFindings,
    name: str,
    trace: RequestTrace,
    prompt_tokens: int,
    run_lengths: Sequence[int],
    ended_by_limit: bool,
) -> None:
    """Adds one conversation: walks the served rounds and holds each against the offline run length of its slot.

    Args:
        findings: to add to.
        name: of the conversation.
        trace: the served request.
        prompt_tokens: P.
        run_lengths: entry i belongs to the round that starts with P + 1 + i committed tokens.
        ended_by_limit: the answer was cut at max_tokens.
    """
    num_steps = findings.served.num_steps
    for number, served in enumerate(trace.rounds):
        index = served.start - prompt_tokens - 1
        tokens_left = len(trace.token_ids) - served.start
        if index >= len(run_lengths):
            break
        offline = min(run_lengths[index], served.num_valid)
        kept = min(served.accepted, tokens_left - 1)  # drafts behind a stop token are accepted, then trimmed
        findings.rounds += 1
        findings.served.add(kept, clamped=served.num_valid < num_steps, ends_request=kept + 1 >= tokens_left)
        if min(offline, tokens_left - 1) != kept:
            findings.differing_rounds += 1
            if findings.first is None:
                findings.first = Disagreement(name, number, served.start, min(offline, tokens_left - 1), kept)
    findings.offline.merge(run_lengths_to_tau([ConversationRuns(run_lengths, ended_by_limit)], num_steps))
