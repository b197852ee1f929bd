"""Launches whose results the host has not read yet, and how it waits for them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.runner import PrefillResult, RoundResult
from slipstream.engine.scheduler import Chunk
from slipstream.engine.sequence import Sequence
from slipstream.kernels.round_ring import RoundRecord, RoundRing

# A launch is waited for without sleeping this long: sleeping would add its own time to each round.
SPIN_SECONDS = 0.01
NAP_SECONDS = 50e-6
# After this long without a result the device is asked whether it has failed, and after so many times it is given up.
LOOK_SECONDS = 5.0
STALLED_LOOKS = 24


@dataclass(eq=False, slots=True)
class Flight:
    """One launch that is out.

    Args:
        entry: number of its record in the ring.
        sequences: whom it serves; some may end before it is read.
        result: where its tensors lie until the next launch of the same size.
        launched_at: by `time.perf_counter`.
        chunks: of prompts, one a sequence; none for a round.
        num_steps: K of a round.
    """

    entry: int
    sequences: list[Sequence]
    result: RoundResult | PrefillResult
    launched_at: float
    chunks: list[Chunk] = field(default_factory=list)
    num_steps: int = 0


def wait_for(
    ring: RoundRing, flight: Flight, device: torch.device, check_peers: Callable[[], None] = lambda: None
) -> RoundRecord:
    """The record of a launch, as soon as it is there.

    Args:
        ring: of the device.
        flight: the launch.
        device: where it runs.
        check_peers: called while waiting, and before the record is believed; raises when a peer is lost.

    Raises SlipstreamError when the device reports an error, or gives no result for minutes.
    """
    count = len(flight.sequences)
    record = ring.read(flight.entry, count)
    began, looks = time.perf_counter(), 0
    while record is None:
        waited = time.perf_counter() - began
        if waited > SPIN_SECONDS:
            time.sleep(NAP_SECONDS)
        problem = None
        if waited > (looks + 1) * LOOK_SECONDS:
            looks += 1
            problem = _look_at_device(device, waited, looks)
        check_peers()
        record = ring.read(flight.entry, count)  # behind the look at the device, which may have ended just before
        if problem and record is None:
            raise problem
    check_peers()
    return record


def _look_at_device(device: torch.device, waited: float, looks: int) -> SlipstreamError | None:
    """What to say when it has failed, has nothing left to do, or has been looked at too often; else None."""
    found = ""
    if device.type == "cuda":
        try:
            if torch.cuda.current_stream(device).query():
                found = "the device has done everything that was launched, and its record never came"
        except RuntimeError as error:
            found = f"the device failed: {error}"
    elif looks:
        found = "a launch on the CPU left no record"
    if not found and looks < STALLED_LOOKS:
        return None
    return SlipstreamError(
        found or f"the device has given no result for {waited:.0f} s",
        expected="a record of every launch, within seconds",
        do="start again; CUDA_LAUNCH_BLOCKING=1 and compute-sanitizer find the kernel, `nvidia-smi` shows a card that "
        "fell off or is held by somebody else",
    )
