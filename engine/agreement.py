"""Do all ranks do the same? Compared bit for bit, after every step or after some; a difference ends them all.

Each rank runs the same step from the same inputs, and reductions give the same bits everywhere. A rank that goes its
own way (a state captured before its reduce, or on one rank only) need not show in the tokens, ever: logits are put
together from all ranks' parts, so every rank still takes the same token. So captured states are compared too.

On a card that is for requests that are traced: what a step left there must be fetched and waited for. Of the others the
committed tokens and counts are compared, which the host reads anyway, and only every so many steps.
"""

import hashlib
from collections.abc import Mapping

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels.all_gather import all_gather
from slipstream.kernels.round_ring import RoundRecord

# Steps between two comparisons of ranks that do not wait for each step: one costs the hosts a few 100 us.
STEPS_APART = 64
_WORDS = ("committed tokens", "drafts", "captured states")
_TOKENS, _DRAFTS, _STATES = range(len(_WORDS))
# A digest is a polynomial in this odd number, modulo 2^64.
_STEP = 0x9E3779B97F4A7C15
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankAgreement:
    """Digests of what a step did, and their comparison.

    Args:
        parallel: the ranks, two or more.
        compare_states: whether captured states count (off: for tests, which show that the fault then passes).
    """

    def __init__(self, parallel: TensorParallel, *, compare_states: bool = True) -> None:
        self.parallel, self.compare_states = parallel, compare_states
        self.steps = 0
        self._digests = [0] * len(_WORDS)
        self._compared = 0  # steps, at the last comparison

    def note_tokens(self, *tensors: torch.Tensor) -> None:
        """What a step committed."""
        self._note(_TOKENS, *tensors)

    def note_drafts(self, *tensors: torch.Tensor) -> None:
        """What the draft proposed."""
        self._note(_DRAFTS, *tensors)

    def note_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """What was captured, by slot."""
        if self.compare_states:
            self._note(_STATES, *(states[name] for name in sorted(states)))

    def note_record(self, record: RoundRecord) -> None:
        """What a launch committed, where its tensors are not looked at."""
        for request in record.requests:
            for value in (request.start, request.accepted, len(request.tokens), *request.tokens):
                self._digests[_TOKENS] = (self._digests[_TOKENS] * _STEP + value + 1) % 2**64

    def end_step(self, *, compare: bool) -> None:
        """A step is over. `compare`: the same on all ranks; false: only if the last comparison is long ago."""
        self.steps += 1
        if compare or self.steps - self._compared >= STEPS_APART:
            self.check()

    def check(self) -> None:
        """Compares the digests with everybody's. Raises SlipstreamError, on every rank, where they differ."""
        first, self._compared = self._compared + 1, self.steps
        when = f"step {self.steps}" if first >= self.steps else f"steps {first} to {self.steps}"
        values = torch.tensor([_signed(value) for value in self._digests])  # [3] int64
        self._digests = [0] * len(_WORDS)
        everybody = all_gather(values, [len(_WORDS)] * self.parallel.size, self.parallel.group)
        for part, word in enumerate(_WORDS):
            strangers = _strangers([int(values[part]) for values in everybody])
            if strangers:
                raise disagreement(f"the {word} of {when}", strangers, self.parallel.size)

    def _note(self, part: int, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._digests[part] = (self._digests[part] * _STEP + _digest(tensor)) % 2**64


def check_same(parallel: TensorParallel, facts: Mapping[str, object]) -> None:
    """Compares what every rank found at start: weights, versions, sizes. Raises SlipstreamError, on every rank.

    Args:
        parallel: the ranks.
        facts: the same keys on every rank; values are compared by their `repr`.
    """
    if parallel.size == 1:
        return
    hashes = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in facts.values()]
    values = torch.tensor([int.from_bytes(value, "little", signed=True) for value in hashes])
    everybody = all_gather(values, [len(facts)] * parallel.size, parallel.group)
    for i, name in enumerate(facts):
        strangers = _strangers([int(values[i]) for values in everybody])
        if strangers:
            raise disagreement(f"the {name}", strangers, parallel.size)


def disagreement(what: str, ranks: list[int], size: int) -> SlipstreamError:
    """The error for ranks that differ from the others."""
    who = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} differ"
    return SlipstreamError(
        f"{who} from the other {size - len(ranks)} of {size} ranks in {what}",
        expected="the same bits on every rank: all run the same step from the same inputs",
        do="look for what that rank does alone: another file or version, a state captured before its all-reduce or on "
        "some ranks only",
    )


def _strangers(values: list[int]) -> list[int]:
    """Ranks whose value is not the most frequent one (the lowest rank's, where several are)."""
    usual = max(dict.fromkeys(values), key=values.count)
    return [rank for rank, value in enumerate(values) if value != usual]


def _digest(tensor: torch.Tensor) -> int:
    """Of the bits and their places: a sum of bits x odd weights, modulo 2^64."""
    bits = tensor.reshape(-1).view(_INT_OF_SIZE[tensor.element_size()]).cpu().long()  # [n] of any dtype -> [n] int64
    return int((bits * torch.arange(1, 2 * bits.numel(), 2)).sum()) if bits.numel() else 0


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
