"""Reads memory once and keeps next to nothing: the read rate that every other kernel is measured against."""

import torch
import triton
import triton.language as tl

_BLOCK = 8192


@triton.jit
def _read_stream(x, out, n, BLOCK: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, n, programs * BLOCK):
        total += tl.load(x + start.to(tl.int64) + tl.arange(0, BLOCK))  # type: ignore[attr-defined]
    tl.store(out + program, tl.sum(total))


def read_stream(x: torch.Tensor, programs: int = 132 * 16) -> torch.Tensor:
    """Sums a flat fp32 tensor whose size is a multiple of 8192: [programs] partial sums."""
    if x.numel() % _BLOCK:
        raise ValueError(f"{x.numel()} values; a multiple of {_BLOCK} is needed")
    out = torch.empty(programs, dtype=torch.float32, device=x.device)
    _read_stream[(programs,)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out
