"""What the benchmarks of matrix products share: times of CUDA graphs whose weights are cold, and the torch twins."""

import statistics
from collections.abc import Callable
from types import SimpleNamespace

import torch

from slipstream.kernels import linear_add, norm_gate_up, norm_linear, norm_qkv

COLD_BYTES = 300e6  # weights rotate through so many: five times the L2
# The ops as torch runs them while gradients are recorded: no kernel is taken.
TWINS = SimpleNamespace(
    norm_qkv=norm_qkv.norm_qkv,
    linear_add=linear_add.linear_add,
    norm_gate_up=norm_gate_up.norm_gate_up,
    norm_linear=norm_linear.norm_linear,
)


def copies_of(num_bytes: float) -> int:
    """How many weights of so many bytes a graph must go through so that each is read from memory."""
    return max(2, round(COLD_BYTES / num_bytes))


def seconds_per_replay(work: Callable[[], object], replays: int = 7) -> float:
    """Median time of one replay of the graph that `work` becomes."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    times = []
    for i in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(times)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
