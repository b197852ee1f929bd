"""States of many token sequences in one forward pass each, by the prefill that serving runs.

The bits are those of one sequence at a time (`runner.capture_states`), for a row's bits depend neither on its
neighbours nor on padding; a GPU merely gets enough rows to be busy.
"""

from collections.abc import Iterator, Sequence

import torch

from slipstream.engine.block_manager import DUMMY_BLOCK
from slipstream.engine.capture import slot_name
from slipstream.engine.models import TargetModel

_BLOCK_SIZE = 16


class BatchCapture:
    """Captures groups of sequences, over a KV cache of its own.

    Args:
        target: a loaded target.
        slots: which states to hand out.
        max_rows: rows of a forward pass, padding included; a longer sequence makes a pass by itself.
        longest: tokens of the longest sequence that will come.
    """

    def __init__(self, target: TargetModel, slots: tuple[int, ...], max_rows: int, longest: int) -> None:
        self.target, self.slots, self.max_rows = target, slots, max(max_rows, _padded(longest))
        self._cache = target.allocate_kv(DUMMY_BLOCK + 1 + self.max_rows // _BLOCK_SIZE, _BLOCK_SIZE)

    def groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of consecutive sequences of these lengths that fit into one pass."""
        group: list[int] = []
        width = 0
        for index, length in enumerate(lengths):
            wider = max(width, _padded(length))
            if group and wider * (len(group) + 1) > self.max_rows:
                yield group
                group, wider = [], _padded(length)
            group, width = [*group, index], wider
        if group:
            yield group

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """For each sequence of T ids, on the CPU: (slot name -> [T, h], slot N before the final norm [T, h]).

        Raises ValueError for more rows than the cache holds.
        """
        width = _padded(max(len(ids) for ids in sequences))  # R
        if len(sequences) * width > self.max_rows:
            raise ValueError(f"{len(sequences)} sequences of up to {width} rows: more than {self.max_rows} in all")
        token_ids = torch.zeros(len(sequences), width, dtype=torch.int64)  # [B, R]
        positions = torch.full_like(token_ids, -1)
        for row, ids in enumerate(sequences):
            token_ids[row, : len(ids)] = torch.tensor(ids)
            positions[row, : len(ids)] = torch.arange(len(ids))
        blocks = torch.arange(token_ids.numel() // _BLOCK_SIZE).view(len(sequences), -1) + DUMMY_BLOCK + 1  # [B, R/16]
        device = self._cache.layers[0].device
        kv = self._cache.view(blocks.to(device), prefill=True)
        out = self.target(token_ids.to(device), positions.to(device), kv, self.slots)
        states = {slot_name(slot): out.states[slot_name(slot)].cpu() for slot in self.slots}  # [B, R, h]
        last = out.last.cpu()  # [B, R, h]
        return [
            ({name: state[row, : len(ids)].clone() for name, state in states.items()}, last[row, : len(ids)].clone())
            for row, ids in enumerate(sequences)
        ]


def _padded(length: int) -> int:
    """Whole blocks."""
    return -(-length // _BLOCK_SIZE) * _BLOCK_SIZE
