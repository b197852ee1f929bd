"""The launches of the attention kernels that are compiled without a card: few and many rows."""

import torch

from slipstream.kernels.gpu.attention_split import Cut, tile_of, usual_cut
from slipstream.kernels.gpu.norm_qkv import norm_qkv
from slipstream.kernels.gpu.paged_attention import paged_attention
from slipstream.kernels.gpu.prefill_attention import prefill_attention
from slipstream.kernels.gpu.write_index import write_index
from slipstream.kernels.norm_qkv import Heads, KVSink
from slipstream.kernels.stream import Norm, Stream

SMOLLM2, LLAMA, WIDEST, TINY = (9, 3, 64), (32, 8, 128), (8, 4, 256), (4, 2, 16)  # heads, kv_heads, head_dim


def _arguments(
    num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    heads, kv_heads, head_dim = shape
    with torch.device("meta"):
        return (
            torch.empty(2, num_rows, heads, head_dim, dtype=dtype),
            torch.empty(100, 16, 2, kv_heads, head_dim, dtype=dtype),
            torch.empty(2, 512, dtype=torch.int64),
            torch.empty(2, num_rows, dtype=torch.int64),
            0.1,
        )


def decode() -> None:
    paged_attention(*_arguments(1, SMOLLM2, torch.bfloat16))
    paged_attention(*_arguments(16, SMOLLM2, torch.bfloat16), window=100)
    paged_attention(*_arguments(1, LLAMA, torch.bfloat16))
    paged_attention(*_arguments(16, LLAMA, torch.bfloat16))
    paged_attention(*_arguments(16, WIDEST, torch.bfloat16))
    paged_attention(*_arguments(4, TINY, torch.float32))
    for num_rows, (heads, kv_heads, head_dim) in ((1, SMOLLM2), (16, SMOLLM2), (4, WIDEST)):  # two programs on an SM
        many = usual_cut(64, 64 * kv_heads, tile_of(head_dim, torch.bfloat16))
        paged_attention(*_arguments(num_rows, (heads, kv_heads, head_dim), torch.bfloat16), cut=many)


def behind_qkv() -> None:
    """As in a layer, then as in a chain of attention alone."""
    q, cache, *others = _arguments(4, SMOLLM2, torch.bfloat16)
    heads = Heads(*SMOLLM2)
    with torch.device("meta"):
        rows, norm = torch.empty(8, 576, dtype=torch.bfloat16), torch.empty(576, dtype=torch.bfloat16)
        weight, angles = torch.empty(15 * 64, 576, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16)
        sink = KVSink(cache, torch.empty(8, dtype=torch.int64))
    norm_qkv(Stream(rows), Norm(norm, 1e-5), weight, heads, angles, angles, None, None, sink)
    paged_attention(q, cache, *others)
    paged_attention(q, cache, *others)
    paged_attention(q, cache, *others, cut=Cut(settles=True))


def prefill() -> None:
    prefill_attention(*_arguments(100, SMOLLM2, torch.bfloat16), window=100)
    prefill_attention(*_arguments(100, LLAMA, torch.bfloat16))
    prefill_attention(*_arguments(100, WIDEST, torch.bfloat16))
    prefill_attention(*_arguments(100, TINY, torch.float32))
    _, _, table, positions, _ = _arguments(100, TINY, torch.float32)
    write_index(table, positions, 16)


def largest() -> None:
    """Those that need the most shared memory."""
    for shape in (LLAMA, WIDEST):
        paged_attention(*_arguments(16, shape, torch.bfloat16))
        prefill_attention(*_arguments(100, shape, torch.bfloat16))
