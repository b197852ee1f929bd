"""Is the stored teacher the target? Logits made from it are held against the engine's own, before any training (F7).

The teacher is stored before the final norm, so whoever makes logits of it applies that norm exactly once. Left out or
applied twice it still trains without complaint, on the distribution of another model.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import ConversationStates
from slipstream.engine.models import TargetModel
from slipstream.engine.runner import capture_states
from slipstream.kernels.linear import linear

# Same machine, same code: equal bits. Another machine may round otherwise; a wrong norm is off by tens of percent.
MAX_RELATIVE_ERROR = 0.02
MAX_ARGMAX_DIFFERENCE = 0.005
# A top token may change places with one this close to it: two units in the last place of bf16, relative.
_TIE = 2 * 2.0**-7


@dataclass(frozen=True)
class TeacherReport:
    """What was compared.

    Args:
        conversations, positions: how many.
        relative_error: norm of the difference of the logits / norm of the engine's logits.
        argmax_differences: positions whose most likely token differs, near-ties left out.
    """

    conversations: int
    positions: int
    relative_error: float
    argmax_differences: int

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)


@torch.no_grad()  # where gradients could be recorded, a GPU would not run the engine's own kernels
def check_teacher(
    target: TargetModel,
    sample: Sequence[ConversationStates],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    skip: Collection[str] = (),
) -> TeacherReport:
    """Compares logits of stored teacher states with the engine's own, for the same tokens.

    Args:
        target: the target, loaded.
        sample: conversations from the store.
        logits_of: teacher states [n, h] -> logits [n, V], as the user of the store makes them.
        skip: faults whose checks are off.

    Returns:
        The figures. Raises SlipstreamError (F7), which says where the final norm is missing or applied twice, or which
        state was stored instead of the teacher.
    """
    wrong = right = 0.0
    positions = differ = 0
    for states in sample:
        engine_last = _engine_states(target, states, ())[1]
        engine = target.logits(engine_last).float()  # [n, V]
        ours = logits_of(states.teacher).float()  # [n, V]
        wrong += float((ours - engine).square().sum())
        right += float(engine.square().sum())
        top, chosen = engine.max(dim=-1).values, engine.gather(1, ours.argmax(-1, keepdim=True)).squeeze(1)  # [n]
        differ += int((top - chosen > _TIE * top.abs()).sum())
        positions += len(top)
    if not positions:
        raise SlipstreamError(
            "no conversation of the sample has a teacher state", expected="one or more answers", fault="F10"
        )
    report = TeacherReport(len(sample), positions, (wrong / right) ** 0.5, differ)
    if report.relative_error <= MAX_RELATIVE_ERROR and differ <= MAX_ARGMAX_DIFFERENCE * positions:
        return report
    if "F7" not in skip:
        cause, do = _diagnose(target, sample[0], logits_of)
        raise SlipstreamError(
            f"{cause}. Logits of the stored teacher are off by {report.relative_error:.1%} from the engine's own, "
            f"{differ} of {positions} most likely tokens differ",
            expected=f"head(final_norm(slot N)): within {MAX_RELATIVE_ERROR:.0%}, the same most likely tokens",
            do=do,
            fault="F7",
        )
    return report


def _engine_states(
    target: TargetModel, states: ConversationStates, slots: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(slot name -> [n, h], slot N [n, h]) at the positions that have a teacher state, by the engine."""
    captured, last = capture_states(target, states.token_ids.tolist(), slots)  # [T, h]
    start = states.teacher_start
    return {name: state[start:] for name, state in captured.items()}, last[start:]


def _diagnose(
    target: TargetModel, states: ConversationStates, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[str, str]:
    """(cause, remedy) in words, from one conversation."""
    num_layers = target.config.num_layers
    captured, last = _engine_states(target, states, tuple(range(num_layers)))
    normed = target.final_norm(last)
    stored = {**captured, slot_name(num_layers): last, "slot N after the final norm": normed}
    found = _nearest(states.teacher, stored)
    extract = "extract again, and store slot N before the final norm"
    if found == "slot N after the final norm":
        return "the final norm is applied twice: the store holds slot N after it", extract
    if found != slot_name(num_layers):
        return f"the stored teacher is nearest to {found}, not to {slot_name(num_layers)}", extract
    head = target.head_weight
    made = {
        "the final norm is missing": linear(last, head),
        "the final norm is applied twice": linear(target.final_norm(normed), head),
        "the head or the final norm is not the target's": target.logits(last),
    }
    return _nearest(logits_of(states.teacher), made), "apply the target's own final norm once, then its head"


def _nearest(x: torch.Tensor, candidates: dict[str, torch.Tensor]) -> str:
    """Name of the candidate with the smallest relative distance to `x`, all [n, ...]."""
    return min(candidates, key=lambda name: float((x.float() - candidates[name].float()).norm() / x.float().norm()))
