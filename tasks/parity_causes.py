"""What a wrong capture really is: the known mistakes, computed offline from the target, and which one it equals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.capture import slot_id
from slipstream.engine.layers import RowParallelLinear
from slipstream.engine.models import TargetModel
from slipstream.engine.models.dense import DenseLayer, DenseModel
from slipstream.engine.runner import capture_states
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.linear import linear
from slipstream.kernels.stream import Stream
from slipstream.kernels.weight import as_matrix
from slipstream.tasks.parity_capture import CapturedRows, SlotRows

EXPECTED_COSINE = 0.99
CONVERSATIONS = 3  # wrong ones, that are looked at
MAX_SHARE = 0.1  # of the error to the slot's own reference: what a cause may leave unexplained
MIN_EARLIER_SHARE = 0.5  # of the wrong rows; the others may be stale rows of rejected drafts, which nobody keeps


@dataclass(frozen=True)
class Cause:
    """One way to capture the wrong thing: what it is called, the fault that it is, and how it is mended."""

    name: str
    fault: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """The known cause that a wrong slot is nearest to.

    cosine_own, cosine: of the served states with the slot's own reference and with the cause's, each dimension in units
        of its own size. explained: whether it is the cause. note: what else has been seen.
    """

    slot: int
    cause: Cause
    cosine_own: float
    cosine: float
    explained: bool
    note: str = ""

    def describe(self) -> str:
        own = f"cosine to its own reference {self.cosine_own:.2f} (expected > {EXPECTED_COSINE})"
        if not self.explained:
            return (
                f"slot {self.slot} equals nothing known: {own}; nearest is {self.cause.name} ({self.cosine:.2f}); "
                "fix: compare the capture code with the slot's definition, the stream after that many layers"
            )
        to_cause = f"to {self.cause.name} {self.cosine:.2f}"
        note = f" ({self.note})" if self.note else ""
        return f"slot {self.slot} equals {self.cause.name}{note}: {own}, {to_cause}; fix: {self.cause.fix}"


def diagnose(target: TargetModel, rows: SlotRows, captured: Sequence[int], num_ranks: int = 1) -> Diagnosis | None:
    """Compares the states of a wrong slot with every known cause.

    Args:
        target: in one process, for the states that a mistake would have given.
        rows: of the slot.
        captured: the slots that the server captures: another one of them means that two changed places.
        num_ranks: of the server.

    Returns None when no row is wrong, or for a target whose parts are not known here.
    """
    wrong = [kept for kept in rows.kept if kept.wrong.any()][:CONVERSATIONS]
    if not wrong or not isinstance(target, DenseModel):
        return None
    served = torch.cat([kept.served for kept in wrong])  # [n, h], of all conversations
    own = torch.cat([kept.eager for kept in wrong])
    size = own.square().mean(0).sqrt().clamp(min=1e-6)  # [h]
    choices = [(_ZEROS, torch.zeros_like(own))]
    every = [list(mistakes(target, kept.token_ids, rows.slot, captured, num_ranks)) for kept in wrong]
    for same in zip(*every, strict=True):
        choices.append((same[0][0], torch.cat([states.float() for _, states in same])))
    errors = [((served - states) / size).square().mean().sqrt().item() for _, states in choices]
    best = min(range(len(errors)), key=errors.__getitem__)
    cause, states = choices[best]
    explained = errors[best] <= MAX_SHARE * ((served - own) / size).square().mean().sqrt().item()
    cosine_own, cosine = _cosine(served / size, own / size), _cosine(served / size, states / size)
    stale = None if explained else _find_earlier(rows, wrong, size)
    return stale or Diagnosis(rows.slot, cause, cosine_own, cosine, explained)


def _find_earlier(rows: SlotRows, wrong: Sequence[CapturedRows], size: torch.Tensor) -> Diagnosis | None:
    """Whether most wrong rows are right captures of other rows: then a buffer is read that was written before."""
    pool = torch.cat([kept.eager for kept in rows.kept]) / size  # [p, h]
    places = [(kept.prompt, position) for kept in rows.kept for position in range(len(kept.eager))]
    served = torch.cat([kept.served[kept.wrong] for kept in wrong]) / size  # [w, h]
    own = torch.cat([kept.eager[kept.wrong] for kept in wrong]) / size
    nearest = torch.cdist(served, pool).argmin(-1)  # [w]
    equal = (served - pool[nearest]).norm(dim=-1) <= MAX_SHARE * (served - own).norm(dim=-1)  # [w] bool
    if equal.float().mean() < MIN_EARLIER_SHARE:
        return None
    first = int(equal.nonzero()[0])
    mine = [(kept.prompt, int(position)) for kept in wrong for position in kept.wrong.nonzero()[:, 0]][first]
    prompt, position = places[int(nearest[first])]
    where = f"position {position}" + (f" of {prompt}" if prompt != mine[0] else "")
    note = f"{int(equal.sum())} of {len(equal)} wrong rows; position {mine[1]} of {mine[0]} holds {where}"
    cosine_own, cosine = _cosine(served, own), _cosine(served[equal], pool[nearest][equal])
    return Diagnosis(rows.slot, _EARLIER, cosine_own, cosine, True, note)


_NOWHERE = object()  # stands for a group: shares are asked for, nothing is exchanged
_ZEROS = Cause("zeros", "F6", "nothing was ever written: capture inside the graph, into the buffer that is read")
_EARLIER = Cause(
    "an earlier capture, of other rows",
    "F6",
    "make the copy part of what every replay runs, and read it only when the replay is done",
)


def mistakes(
    target: DenseModel, token_ids: Sequence[int], slot: int, captured: Sequence[int], num_ranks: int
) -> Iterator[tuple[Cause, torch.Tensor]]:
    """Every known mistake at `slot` with the states [n, h] that it gives at the first n = tokens - 1 positions."""
    seen = _Seen(target, slot)
    with seen:
        states, _ = capture_states(target, token_ids[:-1], tuple(range(len(target.layers) + 1)))
    stream = {slot_id(name): state for name, state in states.items()}
    for other, state in stream.items():
        if other == slot:
            continue
        if other in captured:
            yield Cause(f"slot {other}'s state", "F3", "the slots stand in another order than they are named in"), state
        else:
            fix = f"layer ids are off by {other - slot:+d}: slot k is the stream after k layers, 0 the embedding"
            yield Cause(f"slot {other}'s state", "F4", fix), state
    last = slot == len(target.layers)
    norm = target.norm if last else _layer(target, slot).input_layernorm
    words = "the state after the final norm" if last else "the next layer's normed input"
    yield Cause(words, "F7" if last else "F5", "capture the residual stream, before the norm"), norm(stream[slot])
    if not last:
        yield Cause("the state after the final norm", "F7", "capture before any norm"), target.norm(stream[slot])
    if slot:
        block, residual = seen.states("block"), seen.states("residual")
        yield (
            Cause("the block's output without the residual", "F5", "add the residual stream before the capture"),
            block,
        )
        yield (
            Cause("the stream without the last block's output", "F5", "capture after the block's output is added"),
            residual,
        )
    for rank in range(num_ranks if num_ranks > 1 else 0):
        yield _partial_cause(slot, rank), seen.partial_sum(rank, num_ranks, token_ids[:-1])


def _partial_cause(slot: int, rank: int) -> Cause:
    what = "the vocab-parallel embedding" if slot == 0 else f"layer {slot - 1}'s last projection"
    return Cause(f"rank {rank}'s partial sum before the reduce", "F5", f"capture after the all-reduce of {what}")


class _Seen:
    """Watches what layer `slot - 1` adds last while the target runs: its parts are what mistakes are made of."""

    def __init__(self, target: DenseModel, slot: int) -> None:
        self.target, self.slot = target, slot
        self._kept: dict[str, list[torch.Tensor]] = {"block": [], "residual": [], "input": []}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        if self.slot:
            down_proj = _layer(self.target, self.slot - 1).mlp.down_proj
            self._hooks = [down_proj.register_forward_hook(self._keep_last_add)]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_last_add(self, layer: RowParallelLinear, args: tuple[torch.Tensor, Stream], _out: Stream) -> None:
        x, stream = args
        self._kept["block"].append(layer.partial(x))  # the target is in one process: the part is the whole
        self._kept["residual"].append(stream.rows)
        self._kept["input"].append(x)

    def states(self, name: str) -> torch.Tensor:
        """[n, ...] of all chunks."""
        return torch.cat(self._kept[name])

    def partial_sum(self, rank: int, num_ranks: int, token_ids: Sequence[int]) -> torch.Tensor:
        """[n, h]: the stream on one of `num_ranks` ranks before the all-reduce of its last addend."""
        parallel = TensorParallel(rank, num_ranks, group=_NOWHERE)
        if not self.slot:
            embedding, ids = self.target.embed_tokens.weight, torch.tensor(list(token_ids))
            cut = parallel.cut(len(embedding))
            here = (ids >= cut.start) & (ids < cut.stop)  # [n], rows of the rank's vocabulary
            return embedding[ids] * here[:, None]
        x = self.states("input")
        weight = as_matrix(_layer(self.target, self.slot - 1).mlp.down_proj.weight, x.dtype)  # [h, m]
        cut = parallel.cut(weight.shape[1])
        columns = slice(cut.start, cut.stop)
        return self.states("residual") + linear(x[:, columns], weight[:, columns].contiguous())


def _layer(target: DenseModel, index: int) -> DenseLayer:
    layer = target.layers[index]
    assert isinstance(layer, DenseLayer)
    return layer


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two [w, h], over all their numbers."""
    size = a.norm() * b.norm()
    return float((a * b).sum() / size) if size else 0.0
