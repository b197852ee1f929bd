"""Is the stored teacher the target? What is stored, and logits made from it, before any training (F7).

The teacher is stored before the final norm, so whoever makes logits of it applies that norm exactly once. Left out or
applied twice it still trains without complaint, on the distribution of another model.

Two parts, for rounding leaves them different room. Logits are held against those that the engine makes of the very same
stored state: one norm and one product, a last place. The stored state is held against the one that the engine computes
now: all the layers in an order of rounding that may be another (other kernels, another machine) and then moves every
state; other slots are tens of percent away.
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

MAX_ARGMAX_DIFFERENCE = 0.005
# A top token may change places with one this close to it: two units in the last place of bf16, relative.
_TIE = 2 * 2.0**-7
# SmolLM2's 30 layers in bf16, states of another order of rounding: 1.9 to 2.3 %; another slot: 86 % and more; weights
# that are 2 % off: 7 %, 5 % off: 15 %. Its head, of the same state: 0.3 to 0.4 %; without the norm: hundreds.
_STATE_ROUNDINGS, _LEAST_STATE_ERROR = 12, 1e-3
_LEAST_LOGITS_ERROR = 1e-4  # fp32: long sums in another order


def max_logits_error(dtype: torch.dtype) -> float:
    """Relative, of the same stored state: a unit in the last place (bf16: 0.8 %)."""
    return max(torch.finfo(dtype).eps, _LEAST_LOGITS_ERROR)


def max_state_error(dtype: torch.dtype) -> float:
    """Relative, between two computations of slot N in `dtype` (bf16: 9 %)."""
    return max(_STATE_ROUNDINGS * torch.finfo(dtype).eps, _LEAST_STATE_ERROR)


@dataclass(frozen=True)
class TeacherReport:
    """What was compared.

    Args:
        conversations, positions: how many.
        logits_error: norm of the difference of the logits / norm of the engine's, both made of the stored state.
        argmax_differences: positions whose most likely token differs there, near-ties left out.
        state_error: norm of stored state - the engine's own / norm of the engine's own.
    """

    conversations: int
    positions: int
    logits_error: float
    argmax_differences: int
    state_error: float

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)

    def describe(self) -> str:
        """For the person who runs a stage."""
        return (
            f"teacher: at {self.positions} positions the stored state is within {self.state_error:.2%} of the engine's "
            f"own, its logits within {self.logits_error:.2%}"
        )


@torch.no_grad()  # where gradients could be recorded, a GPU would not run the engine's own kernels
def check_teacher(
    target: TargetModel,
    sample: Sequence[ConversationStates],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    skip: Collection[str] = (),
) -> TeacherReport:
    """Compares stored teacher states, and logits of them, with the engine's own for the same tokens.

    Args:
        target: the target, loaded.
        sample: conversations from the store.
        logits_of: teacher states [n, h] -> logits [n, V], as the user of the store makes them.
        skip: faults whose checks are off.

    Returns:
        The figures. Raises SlipstreamError (F7), which says where the final norm is missing or applied twice, or which
        state was stored instead of the teacher.
    """
    logits, state = _Distance(), _Distance()
    differ = 0
    for states in sample:
        state.add(states.teacher, _engine_states(target, states, ())[1])
        engine, ours = target.logits(states.teacher).float(), logits_of(states.teacher).float()  # [n, V] each
        logits.add(ours, engine)
        top, chosen = engine.max(dim=-1).values, engine.gather(1, ours.argmax(-1, keepdim=True)).squeeze(1)  # [n]
        differ += int((top - chosen > _TIE * top.abs()).sum())
    positions = sum(len(states.teacher) for states in sample)
    if not positions:
        raise SlipstreamError(
            "no conversation of the sample has a teacher state", expected="one or more answers", fault="F10"
        )
    report = TeacherReport(len(sample), positions, logits.relative, differ, state.relative)
    if "F7" not in skip:
        _judge(report, target, sample, logits_of)
    return report


class _Distance:
    """Between tensors given in pairs, over all of them."""

    def __init__(self) -> None:
        self.wrong = self.right = 0.0

    def add(self, x: torch.Tensor, reference: torch.Tensor) -> None:
        """Both [n, ...]."""
        self.wrong += float((x.float() - reference.float()).square().sum())
        self.right += float(reference.float().square().sum())

    @property
    def relative(self) -> float:
        return float((self.wrong / self.right) ** 0.5) if self.right else float(self.wrong > 0)


def _judge(
    report: TeacherReport,
    target: TargetModel,
    sample: Sequence[ConversationStates],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Raises SlipstreamError (F7) with the cause. The state first: logits of a wrong one say nothing."""
    dtype, last = sample[0].teacher.dtype, slot_name(target.config.num_layers)
    first = next(states for states in sample if len(states.teacher))
    limit = max_state_error(dtype)
    nearest, distance = _nearest_state(target, first)
    if nearest != last or not report.state_error <= limit:
        cause, do = _cause_in_store(nearest, distance, last, limit)
        raise SlipstreamError(
            f"{cause}. The stored teacher is off by {report.state_error:.1%} from the engine's own {last}",
            expected=f"slot N before the final norm, within {limit:.1%}, which another order of rounding may change",
            do=do,
            fault="F7",
        )
    limit = max_logits_error(dtype)
    if not report.logits_error <= limit or report.argmax_differences > MAX_ARGMAX_DIFFERENCE * report.positions:
        raise SlipstreamError(
            f"{_cause_in_logits(target, first, logits_of)}. Logits of the stored teacher are off by "
            f"{report.logits_error:.1%} from those that the engine makes of the same states, "
            f"{report.argmax_differences} of {report.positions} most likely tokens differ",
            expected=f"head(final_norm(slot N)): within {limit:.2%}, the same most likely tokens",
            do="apply the target's own final norm once, then its head",
            fault="F7",
        )


def _engine_states(
    target: TargetModel, states: ConversationStates, slots: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(slot name -> [n, h], slot N [n, h]) at the positions that have a teacher state, by the engine."""
    captured, last = capture_states(target, states.token_ids.tolist(), slots)  # [T, h]
    start = states.teacher_start
    return {name: state[start:] for name, state in captured.items()}, last[start:]


_NORMED = "slot N after the final norm"


def _nearest_state(target: TargetModel, states: ConversationStates) -> tuple[str, float]:
    """(name, relative distance) of the engine's state that the stored teacher is nearest to."""
    num_layers = target.config.num_layers
    captured, last = _engine_states(target, states, tuple(range(num_layers)))
    candidates = {**captured, slot_name(num_layers): last, _NORMED: target.final_norm(last)}
    name = _nearest(states.teacher, candidates)
    distance = _Distance()
    distance.add(states.teacher, candidates[name])
    return name, distance.relative


def _cause_in_store(nearest: str, distance: float, last: str, limit: float) -> tuple[str, str]:
    """(cause, remedy) in words. nearest, distance: of the engine's states; last: the name of slot N."""
    extract = "extract again, and store slot N before the final norm"
    if nearest == last or distance > limit:
        return (
            f"the stored teacher is none of the engine's states, the nearest is {nearest}: other weights, or a kernel "
            "at fault",
            "extract again with this target; if that does not help, compare it with transformers (stage parity)",
        )
    if nearest == _NORMED:
        return "the final norm is applied twice: the store holds slot N after it", extract
    return f"the stored teacher is {nearest}, not {last}", extract


def _cause_in_logits(
    target: TargetModel, states: ConversationStates, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> str:
    """In words, from one conversation."""
    head, last = target.head_weight, states.teacher
    normed = target.final_norm(last)
    made = {
        "the final norm is missing": linear(last, head),
        "the final norm is applied twice": linear(target.final_norm(normed), head),
        "the head or the final norm is not the target's": target.logits(last),
    }
    return _nearest(logits_of(last), made)


def _nearest(x: torch.Tensor, candidates: dict[str, torch.Tensor]) -> str:
    """Name of the candidate with the smallest distance to `x`, all [n, ...]."""
    return min(candidates, key=lambda name: float((x.float() - candidates[name].float()).norm()))
