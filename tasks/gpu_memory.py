"""GPU memory in use, by card, through NVML where there is an NVIDIA driver. Looks only; never touches a process."""

import time
from dataclasses import dataclass

from slipstream.tasks.nvml import read_gpus

POLL_SECONDS = 0.5
TOLERANCE_BYTES = 256 << 20  # a display or a monitor may come and go


@dataclass(frozen=True)
class GpuMemory:
    """One card: bytes in use, and the pids (of the host's process table) that the driver says use it."""

    index: int
    used_bytes: int
    pids: tuple[int, ...]


def read_gpu_memory() -> list[GpuMemory] | None:
    """Memory in use on every card; None on a machine without an NVIDIA GPU or its driver."""
    found = read_gpus()
    if found is None or not found.cards:
        return None
    return [GpuMemory(card.index, card.used_bytes, tuple(user.pid for user in card.users)) for card in found.cards]


def wait_gpu_memory(baseline: list[GpuMemory] | None, seconds: float) -> list[GpuMemory]:
    """Waits until every card is back at `baseline` (bytes in use before we started anything).

    Returns the cards that are not, after `seconds`: empty when all are back, or when there is no GPU.
    """
    if baseline is None:
        return []
    allowed = {card.index: card.used_bytes + TOLERANCE_BYTES for card in baseline}
    deadline = time.monotonic() + seconds
    while True:
        above = [c for c in read_gpu_memory() or [] if c.used_bytes > allowed.get(c.index, TOLERANCE_BYTES)]
        if not above or time.monotonic() > deadline:
            return above
        time.sleep(POLL_SECONDS)
