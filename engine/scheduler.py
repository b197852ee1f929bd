"""Who runs next: admission, prefill chunks, decode rounds."""

from collections import deque
from collections.abc import Sequence as Sized
from dataclasses import dataclass

from slipstream.engine.block_manager import BlockManager
from slipstream.engine.config import PrefillBucket
from slipstream.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class Chunk:
    """Prompt positions start..end-1 of one sequence. Cuts lie at absolute multiples of the chunk size."""

    sequence: Sequence
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prompt


class Scheduler:
    """Owner of the queues and of the request slots.

    Args:
        num_slots: requests that run at a time.
        blocks: the KV blocks.
        prefill_chunk: tokens a chunk.
        lookahead: positions beyond a request's limit that a round may touch (K + 1).
        buckets: rows of a prefill launch, ascending, and how many requests it takes.

    A request is admitted, in order of arrival, when a slot and blocks for its worst case are free: then it can always
    run to its end, and nothing is ever preempted.
    """

    def __init__(
        self,
        num_slots: int,
        blocks: BlockManager,
        prefill_chunk: int,
        lookahead: int,
        buckets: Sized[PrefillBucket] | None = None,
    ) -> None:
        self.blocks, self.prefill_chunk, self.lookahead = blocks, prefill_chunk, lookahead
        self.buckets = buckets or (PrefillBucket(prefill_chunk, 1, 1),)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def admit(self) -> list[Sequence]:
        """Gives slots and blocks to the waiting sequences that fit, first come first."""
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            blocks = self.blocks.allocate(sequence.limit + self.lookahead)
            if blocks is None:
                break
            self.waiting.popleft()
            sequence.blocks, sequence.slot = blocks, self._free_slots.pop()
            sequence.status = SequenceStatus.PREFILLING
            self.prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def next_chunks(self) -> list[Chunk]:
        """The next pieces of prompts, a sequence's one each, for one launch: first that of the sequence admitted first.

        Others come along whose pieces need as many rows, by the buckets: padding then costs less than half of them.
        Fewer do while somebody reads a running answer as it comes: its next token waits for this launch.
        """
        chunks: list[Chunk] = []
        if not self.prefilling:
            return chunks
        streams = any(sequence.request.streamed for sequence in self.running)
        bucket, most = self.buckets[0], 1
        for sequence in self.prefilling:
            chunk = self._next_chunk(sequence)
            own = next(one for one in self.buckets if one.rows >= chunk.rows)
            if not chunks:
                bucket, most = own, own.most_beside_streams if streams else own.most_requests
            if own is bucket:
                chunks.append(chunk)
                if len(chunks) == most:
                    break
        return chunks

    def chunks_done(self, chunks: list[Chunk]) -> None:
        """Notes chunks; a sequence whose prompt is through runs from now on."""
        for chunk in chunks:
            chunk.sequence.num_prefilled = chunk.end
            if chunk.is_last:
                self.prefilling.remove(chunk.sequence)
                chunk.sequence.status = SequenceStatus.RUNNING
                self.running.append(chunk.sequence)

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        start = sequence.num_prefilled
        return Chunk(sequence, start, min((start // self.prefill_chunk + 1) * self.prefill_chunk, sequence.num_prompt))

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands, and its slot and blocks back."""
        for queue in (self.waiting, self.prefilling, self.running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING):
            self.blocks.free(sequence.blocks)
            self._free_slots.append(sequence.slot)
        sequence.status, sequence.blocks, sequence.slot = SequenceStatus.FINISHED, [], -1
