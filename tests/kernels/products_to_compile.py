"""The launches of the matrix products that are compiled without a card: every tile of the table, few and many rows."""

import torch

from slipstream.kernels.gpu.norm_linear import norm_linear
from slipstream.kernels.stream import Norm, Stream


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16, parts: int = 0) -> Stream:
    return Stream(empty(m, k, dtype=dtype), empty(m, parts, dtype=torch.float32) if parts else None)


def linears() -> None:
    for n, k in ((576, 576), (4096, 4096)):
        for m in (1, 16, 128):
            norm_linear(rows_of(m, k), Norm(empty(k), 1e-5), empty(n, k))
    norm_linear(rows_of(1, 64, torch.float32), None, empty(64, 64, dtype=torch.float32))
