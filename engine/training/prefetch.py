"""The batches of a plan, in order, on the training's device; read ahead of time where that device is a GPU."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from slipstream.engine.training.data import Batch, ConversationSource, collate

# Reading a batch (map the file, check it, pad, pin) takes a core about as long as a GPU takes for a small draft's step.
_WORKERS = 4
_AHEAD = 12  # batches that are being made or wait


class BatchStream:
    """Iterates over the batches of `plan`. Order and content do not depend on the reading ahead.

    Args:
        source: conversations; read from several threads.
        plan: indices of each batch; where there is none, None comes in its place.
        num_steps: for which batches are collated.
        device: where they go, through pinned memory to a GPU.
        ahead: batches in the making; 0: each is made when it is asked for. None: 0 on the CPU, which has its cores for
            the training itself.
    """

    def __init__(
        self,
        source: ConversationSource,
        plan: Iterable[Sequence[int]],
        num_steps: int,
        device: torch.device,
        *,
        ahead: int | None = None,
    ) -> None:
        self._source, self._plan, self._num_steps, self._device = source, plan, num_steps, device
        if ahead is None:
            ahead = _AHEAD if device.type == "cuda" else 0
        self._ahead = ahead
        # A worker's own tensor operations stay in its thread: sixteen threads each would fight for the cores.
        self._pool = ThreadPoolExecutor(_WORKERS, "batch", lambda: torch.set_num_threads(1)) if ahead else None

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Batch | None]:
        if self._pool is None:
            for members in self._plan:
                yield self._placed(self._make(members))
            return
        waiting: deque[Future[Batch | None]] = deque()
        for members in self._plan:
            waiting.append(self._pool.submit(self._make, members))
            if len(waiting) > self._ahead:
                yield self._placed(waiting.popleft().result())
        while waiting:
            yield self._placed(waiting.popleft().result())

    def _placed(self, batch: Batch | None) -> Batch | None:
        return None if batch is None else batch.to(self._device)

    def _make(self, members: Sequence[int]) -> Batch | None:
        if not members:
            return None
        batch = collate([self._source[i] for i in members], self._num_steps)
        return batch.pin_memory() if self._device.type == "cuda" else batch
