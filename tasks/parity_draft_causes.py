"""What a wrong draft really computes: the known mistakes, run offline on the same features, and which one it equals."""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.layers.attention import Attend
from slipstream.engine.trace import RequestTrace
from slipstream.tasks.parity_draft import CHAIN_ROUNDS, comparable_rounds, own_chain
from slipstream.tasks.parity_rounding import relative_errors, unrolled_logits

CONVERSATIONS = 3  # that are looked at
Change = Callable[[Eagle3Network, torch.Tensor], tuple[Eagle3Network, torch.Tensor]]


def name_draft_cause(
    network: Eagle3Network, traces: Sequence[tuple[RequestTrace, torch.Tensor]], step: int, num_steps: int, bound: float
) -> str:
    """The known mistake whose logits at `step` are those of the server, in words; "" when it is none.

    Args:
        network: the exported draft in fp32.
        traces: (served request, features [n, F] as captured), of several conversations.
        step: the first one that is wrong.
        num_steps: K.
        bound: largest error, in the middle of all rounds, at which two logits count as the same.
    """
    best, best_error = "", bound
    for words, fix, change in _mistakes(network, step):
        errors = [
            relative_errors(served, expected).item()
            for trace, features in traces[:CONVERSATIONS]
            for served, expected in _drafted(network, trace, features, change, step, num_steps)
        ]
        error = statistics.median(errors) if errors else best_error
        if error < best_error:
            best, best_error = f"{words} (error to that {error:.4f}); fix: {fix}", error
    return best


def _drafted(
    network: Eagle3Network, trace: RequestTrace, features: torch.Tensor, change: Change, step: int, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits at `step` of a request's rounds, [1, Vd] each: the server's, and those of the changed draft."""
    tokens = torch.tensor(trace.token_ids)
    if step == 1:  # one pass serves every round
        changed, bent = change(network, features.float())
        with torch.no_grad():
            logits = unrolled_logits(changed, tokens, bent, 1)[0]  # [1, n, Vd] -> [n, Vd]
        for served, slot in comparable_rounds(trace, 1):
            if served.draft_logits is not None:
                yield served.draft_logits[:1], logits[slot : slot + 1]
        return
    for served in trace.rounds[:CHAIN_ROUNDS]:
        if served.draft_logits is None or served.num_valid < step:
            continue
        chain_tokens, chain_features = own_chain(tokens, features, served)
        changed, bent = change(network, chain_features.float())
        with torch.no_grad():
            logits = unrolled_logits(changed, chain_tokens, bent, num_steps)[step - 1]  # [K, n, Vd] -> [n, Vd]
        slot = served.start - 2
        yield served.draft_logits[step - 1 : step], logits[slot : slot + 1]


def _mistakes(network: Eagle3Network, step: int) -> Iterator[tuple[str, str, Change]]:
    """(what is done, how it is mended, the same done here)."""
    names = [slot_name(slot) for slot in network.config.slots]
    if step > 1:
        normed = network.config.norm_output
        fed, trained = ("before", "after") if normed else ("after", "before")
        words = f"the state {fed} the norm is fed back, trained was the one {trained} it"
        yield words, f"feed back the state {trained} the norm", _other_feedback
        yield "the rope position is not advanced from step 2 on", "step k of slot t: position t + k - 1", _still_rope
        return
    for order in permutations(range(len(names))):
        if order != tuple(range(len(names))):
            words = f"fc reads the slots as [{', '.join(names[i] for i in order)}]"
            yield words, f"put them side by side as [{', '.join(names)}], by name", _reordered(order)
    fix = "slot t reads the states at position t, beside the token at t + 1"
    yield "each slot reads the features of the position before it", fix, _shifted(1)
    yield "each slot reads the features of the position behind it", fix, _shifted(-1)


def _other_feedback(network: Eagle3Network, features: torch.Tensor) -> tuple[Eagle3Network, torch.Tensor]:
    changed = copy.copy(network)
    normed = network.config.norm_output
    changed.feedback = lambda state: state if normed else network.norm(state)  # type: ignore[method-assign]
    return changed, features


def _still_rope(network: Eagle3Network, features: torch.Tensor) -> tuple[Eagle3Network, torch.Tensor]:
    changed, first = copy.copy(network), torch.arange(len(features))[None]  # [1, n]

    def forward(tokens: torch.Tensor, g: torch.Tensor, _: torch.Tensor, attend: Attend) -> torch.Tensor:
        return network.forward(tokens, g, first, attend)

    changed.forward = forward  # type: ignore[method-assign,assignment]
    return changed, features


def _reordered(order: Sequence[int]) -> Change:
    def change(network: Eagle3Network, features: torch.Tensor) -> tuple[Eagle3Network, torch.Tensor]:
        parts = features.chunk(len(order), dim=-1)  # [n, F] -> slots x [n, h]
        return network, torch.cat([parts[i] for i in order], dim=-1)

    return change


def _shifted(by: int) -> Change:
    return lambda network, features: (network, features.roll(by, 0))
