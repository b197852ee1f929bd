"""The state of running requests on the device: preallocated tensors, one row a request slot."""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.block_manager import DUMMY_BLOCK
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.sequence import Sequence as Running
from slipstream.kernels.sampling import RowParams, SamplingBatch

# Rows of `RequestTable._scalars`, in this order; top_p stands in its bits.
_NUM_SCALARS = 7


@dataclass(frozen=True)
class Occupant:
    """A request that moves in. Its whole prompt is committed; prefill brings it into the caches.

    Args:
        slot: a free one.
        prompt_ids: the prompt.
        limit: most committed tokens.
        blocks: its KV blocks.
        params: its sampling parameters, seed drawn; None: greedy.
        choice: its choice index.
    """

    slot: int
    prompt_ids: list[int]
    limit: int
    blocks: list[int]
    params: RowParams | None = None
    choice: int = 0

    @classmethod
    def of(cls, sequence: Running) -> "Occupant":
        """An admitted request."""
        request = sequence.request
        return cls(
            sequence.slot, request.prompt_ids, sequence.limit, sequence.blocks, request.params, request.choice_index
        )


class RequestTable:
    """Owner of the tokens, lengths, block tables and sampling parameters that rounds read and write.

    Args:
        num_slots: requests at a time (S). One row more is allocated: `dummy_slot`, length 0, all its blocks the dummy
            block, greedy. Padding rows of a batch name it.
        max_tokens: most committed tokens of a request.
        num_blocks: blocks of a request, at most.
        num_steps: K.
        feature_size: width of the draft's features, 0 where no draft reads any.

    Fields, S + 1 rows each:
        tokens: [S + 1, max_tokens + K + 1] int64, committed tokens, then leftovers.
        lengths: [S + 1] int64, committed tokens.
        limits: [S + 1] int64, most committed tokens.
        block_table: [S + 1, num_blocks] int64.
        features: [S + 1, K + 1, F], of the newly committed positions that the draft has not absorbed yet.
        num_fresh: [S + 1] int64, how many of those there are.
        temperature: [S + 1] fp32; top_k, seed, choice: [S + 1] int64; top_p: [S + 1] fp64. As in `SamplingBatch`.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        num_blocks: int,
        num_steps: int,
        feature_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_steps, self.dummy_slot = num_steps, num_slots
        rows = num_slots + 1
        with torch.device(device):
            self.tokens = torch.zeros(rows, max_tokens + num_steps + 1, dtype=torch.int64)
            self.block_table = torch.full((rows, num_blocks), DUMMY_BLOCK, dtype=torch.int64)
            self.features = torch.zeros(rows, num_steps + 1, feature_size, dtype=dtype)
            self.temperature = torch.zeros(rows, dtype=torch.float32)
            self._scalars = torch.zeros(_NUM_SCALARS, rows, dtype=torch.int64)
        # Each a contiguous view, so that one copy fills a column: a request's row of all of them.
        self.lengths, self.limits, self.num_fresh, self.top_k, self.seed, self.choice = self._scalars[:6]
        self.top_p = self._scalars[6].view(torch.float64)
        self.top_p.fill_(1.0)

    def occupy(self, occupants: Sequence[Occupant]) -> None:
        """Requests move in.

        One copy to the device and a few writes there for all of them, which wait for nothing; what is in flight keeps
        running.
        """
        width, count = self.block_table.shape[1], len(occupants)
        rows: list[int] = []
        for one in occupants:
            rows += one.slot, len(one.prompt_ids), one.limit, 0, *_pack(one.params, one.choice)
            rows += one.blocks
            rows += [DUMMY_BLOCK] * (width - len(one.blocks))
        lengths = torch.tensor([len(one.prompt_ids) for one in occupants])  # [n]
        total = int(lengths.sum())
        owners = torch.repeat_interleave(torch.tensor([one.slot for one in occupants]), lengths)  # [n] -> [T]
        places = torch.arange(total) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)  # [T]
        prompts = torch.tensor(list(itertools.chain.from_iterable(one.prompt_ids for one in occupants)))  # [T]
        packed = self._to_device(torch.cat((torch.tensor(rows), owners, places, prompts)))
        table, owners, places, prompts = packed.split((len(rows), total, total, total))
        columns = table.view(count, -1).T  # [n, 1 + 7 + 1 + blocks] -> [1 + 7 + 1 + blocks, n]
        slots, temperature = columns[0], columns[1 + _NUM_SCALARS].contiguous()
        self._scalars[:, slots] = columns[1 : 1 + _NUM_SCALARS]
        self.temperature[slots] = temperature.view(torch.float64).float()
        self.block_table[slots] = columns[2 + _NUM_SCALARS :].T
        self.tokens[owners, places] = prompts

    def sampling(self, slots: torch.Tensor) -> SamplingBatch:
        """The sampling parameters of the requests at `slots` [B] int64, read when a step uses them."""
        return SamplingBatch(self.temperature, self.top_k, self.top_p, self.seed, self.choice, slots=slots)

    def clear(self, slots: list[int]) -> None:
        """Requests move out; a stale row must not point at blocks that are somebody else's by now."""
        index = self._to_device(torch.tensor(slots, dtype=torch.int64))
        self._scalars[:3].index_fill_(1, index, 0)  # length, limit, fresh
        self.block_table.index_fill_(0, index, DUMMY_BLOCK)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        """[n] int64 on the table's device. From pinned memory, whose allocator keeps it until the copy is done."""
        if not self.tokens.is_cuda:
            return host
        return host.pin_memory().to(self.tokens.device, non_blocking=True)


def _pack(params: RowParams | None, choice: int) -> list[int]:
    """top_k, seed, choice, top_p (fp64 bits), temperature (fp64 bits)."""
    if params is None:
        return [0, 0, choice, _bits(1.0), 0]
    if params.temperature > 0 and params.seed is None:
        raise SlipstreamError(
            "a request has temperature > 0 and no seed", expected="a seed, drawn when it arrives", do="call with_seed"
        )
    return [params.top_k, params.seed or 0, choice, _bits(params.top_p), _bits(params.temperature)]


def _bits(value: float) -> int:
    """A float's 64 bits as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
