"""What the card's memory gives: the read rate that shares are told of."""

import torch


def read_ceiling(gigabytes: float = 4.0, repeats: int = 5) -> float:
    """Bytes a second of a pure read stream (a sum over `gigabytes` of memory), best of the repeats."""
    from slipstream.kernels.gpu.read_stream import read_stream

    data = torch.zeros(int(gigabytes * 2**30 // 4), dtype=torch.float32, device="cuda")
    best = float("inf")
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        read_stream(data)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return data.numel() * 4 / best
