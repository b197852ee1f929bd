"""The launches of the matrix products that are compiled without a card: the classes of tiles, few and many rows."""

import torch

from slipstream.kernels.gpu.draft_input import draft_input
from slipstream.kernels.gpu.embed import embed, embed_at
from slipstream.kernels.gpu.linear_add import linear_add
from slipstream.kernels.gpu.norm_gate_up import norm_gate_up
from slipstream.kernels.gpu.norm_linear import norm_linear
from slipstream.kernels.gpu.norm_qkv import norm_qkv
from slipstream.kernels.gpu.rotary import rotary_rows
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_of(width: int) -> Norm:
    return Norm(empty(width), 1e-5)


def rows_of(m: int, k: int, parts: int = 0) -> Stream:
    return Stream(empty(m, k), empty(m, parts, dtype=torch.float32) if parts else None)


def qkv(m: int, k: int, heads: Heads, parts: int, head_norms: bool) -> None:
    cells = KVSink(empty(4, 16, 2, heads.kv, heads.dim), empty(m, dtype=torch.int64))
    norms = norm_of(heads.dim) if head_norms else None
    angles = empty(m, heads.dim)
    weight = empty((heads.q + 2 * heads.kv) * heads.dim, k)
    norm_qkv(rows_of(m, k, parts), norm_of(k), weight, heads, angles, angles, norms, norms, cells)


def products(row_counts: tuple[int, ...] = (1, 16, 128)) -> None:
    """Resident weights (SmolLM2-135M's sizes), in steps (Llama-3.1-8B's), fp32 (tiny models in tests)."""
    for m in row_counts:
        qkv(m, 576, Heads(9, 3, 64), 0, False)
        linear_add(empty(m, 1536), empty(576, 1536), rows_of(m, 576))
        norm_gate_up(rows_of(m, 4096, 128), norm_of(4096), empty(28672, 4096))
        linear_add(empty(m, 14336), empty(4096, 14336), rows_of(m, 4096, 128))
    for m in (8, row_counts[-1]):
        qkv(m, 4096, Heads(32, 8, 128), 128, True)
        qkv(m, 1024, Heads(16, 8, 128), 0, True)  # Qwen3-0.6B: a head does not stay resident
    norm_gate_up(rows_of(1, 2048), norm_of(2048), empty(8192, 2048))
    qkv(1, 2560, Heads(8, 4, 256), 0, True)
    norm_linear(Stream(empty(5, 64, dtype=torch.float32)), None, empty(64, 64, dtype=torch.float32))
    embed(empty(1, dtype=torch.int64), empty(128256, 4096))
    ids = empty(4, dtype=torch.int64)
    embed_at(ids, empty(49152, 576), ids, empty(2, 8192, 64))
    rotary_rows(empty(2, 8192, 96), empty(4, dtype=torch.int64))
    draft_input(empty(1, dtype=torch.int64), empty(49152, 576), empty(1, 576), norm_of(576), norm_of(576), True)


def few_products() -> None:
    """The same, fewer row counts: for the cards that are only compiled for."""
    products((1, 128))
