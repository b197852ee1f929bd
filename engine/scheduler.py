"""Who runs next: admission, prefill chunks, decode rounds."""

from collections import deque
from dataclasses import dataclass

from slipstream.engine.block_manager import BlockManager
from slipstream.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class Chunk:
    """Prompt positions start..end-1 of one sequence. Cuts lie at absolute multiples of the chunk size."""

    sequence: Sequence
    start: int
    end: int

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

    A request is admitted, in order of arrival, when a slot and blocks for its worst case are free: then it can always
    run to its end, and nothing is ever preempted.
    """

    def __init__(self, num_slots: int, blocks: BlockManager, prefill_chunk: int, lookahead: int) -> None:
        self.blocks, self.prefill_chunk, self.lookahead = blocks, prefill_chunk, lookahead
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

    def next_chunk(self) -> Chunk | None:
        """The next piece of prompt, of the sequence that was admitted first."""
        if not self.prefilling:
            return None
        sequence = self.prefilling[0]
        start = sequence.num_prefilled
        end = min((start // self.prefill_chunk + 1) * self.prefill_chunk, sequence.num_prompt)
        return Chunk(sequence, start, end)

    def chunk_done(self, chunk: Chunk) -> None:
        """Notes a chunk; a sequence whose prompt is through runs from now on."""
        chunk.sequence.num_prefilled = chunk.end
        if chunk.is_last:
            self.prefilling.remove(chunk.sequence)
            chunk.sequence.status = SequenceStatus.RUNNING
            self.running.append(chunk.sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands, and its slot and blocks back."""
        for queue in (self.waiting, self.prefilling, self.running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING):
            self.blocks.free(sequence.blocks)
            self._free_slots.append(sequence.slot)
        sequence.status, sequence.blocks, sequence.slot = SequenceStatus.FINISHED, [], -1
