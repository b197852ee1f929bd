"""Results of rounds on their way to the host: a ring of records in memory that the device writes and the host polls."""

import time
from dataclasses import dataclass

import torch

HEADER = 4  # start, num_valid, accepted, count; the tokens stand behind them


@dataclass(slots=True)  # one a request and round: not frozen, which costs four times as much to make
class RequestRecord:
    """What a round gave one request.

    start: committed tokens before it. num_valid: drafts that it could use. accepted: drafts that stood. tokens: what it
    committed, none where the request had no room.
    """

    start: int
    num_valid: int
    accepted: int
    tokens: list[int]


@dataclass(frozen=True)
class RoundRecord:
    """One entry of the ring. requests: in batch order. stamps_ns: round start, draft end, end, on the device's clock;
    the first two are 0 for a prefill chunk."""

    requests: list[RequestRecord]
    stamps_ns: tuple[int, int, int]


@dataclass(frozen=True)
class RoundRing:
    """A ring of `depth` entries. Entry number i (from 0, in the order of the commits) stands at i % depth.

    Args:
        records: [depth, B, HEADER + K + 1] int64: start, num_valid, accepted, count, tokens.
        stamps: [depth, 3] int64, nanoseconds: round start, draft end, end.
        seq: [depth] int64, i + 1 once entry i can be read; stored after the entry, with system-wide visibility.
        counter: [1] int64, entries published so far; on the device.
        clock: [2] int64, round start and draft end of the round under way; on the device.

    `records`, `stamps` and `seq` are pinned host memory where the device is a GPU. The host must not let more than
    `depth` entries be under way or unread: the next one would overwrite the oldest.
    """

    records: torch.Tensor
    stamps: torch.Tensor
    seq: torch.Tensor
    counter: torch.Tensor
    clock: torch.Tensor

    @classmethod
    def allocate(cls, depth: int, batch: int, num_steps: int, device: torch.device | str) -> "RoundRing":
        """A ring for rounds of up to `batch` requests and K = `num_steps`."""
        pinned = torch.device(device).type == "cuda"
        return cls(
            records=torch.zeros(depth, batch, HEADER + num_steps + 1, dtype=torch.int64, pin_memory=pinned),
            stamps=torch.zeros(depth, 3, dtype=torch.int64, pin_memory=pinned),
            seq=torch.zeros(depth, dtype=torch.int64, pin_memory=pinned),
            counter=torch.zeros(1, dtype=torch.int64, device=device),
            clock=torch.zeros(2, dtype=torch.int64, device=device),
        )

    @property
    def depth(self) -> int:
        return self.seq.shape[0]

    def read(self, index: int, batch: int) -> RoundRecord | None:
        """Entry number `index`, of `batch` requests; None while it is not there yet.

        Raises ValueError when a later entry has overwritten it.
        """
        place = index % self.depth
        published = int(self.seq[place])
        if published <= index:
            return None
        rows = self.records[place, :batch].tolist()
        start, draft_end, end = self.stamps[place].tolist()
        if published != index + 1 or int(self.seq[place]) != published:
            raise ValueError(
                f"entry {index} of a ring of {self.depth} was overwritten by entry {int(self.seq[place]) - 1}"
            )
        requests = [RequestRecord(row[0], row[1], row[2], row[HEADER : HEADER + row[3]]) for row in rows]
        return RoundRecord(requests, (start, draft_end, end))

    def publish(self, columns: torch.Tensor, start_ns: int, draft_end_ns: int) -> None:
        """Writes the next entry from the host (the CPU path): columns [B, 4 + tokens] int64, as in `records`."""
        index = int(self.counter)
        place = index % self.depth
        self.records[place, : columns.shape[0], : columns.shape[1]] = columns
        self.stamps[place] = torch.tensor([start_ns, draft_end_ns, time.perf_counter_ns()])
        self.counter.add_(1)
        self.seq[place] = index + 1
