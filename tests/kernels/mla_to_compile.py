"""The launches around latent attention that are compiled without a card: Kimi-K2.5's sizes, one rank of eight."""

import torch

from slipstream.kernels.gpu.head_linear import head_linear
from slipstream.kernels.gpu.latent_rows import absorb_query, latent_rows, rotate_query, write_latent
from slipstream.kernels.gpu.mla_attention import mla_attention, mla_prefill
from slipstream.kernels.paged_attention import AttentionRows
from slipstream.kernels.stream import Norm

HEADS, RANK, NOPE, ROPE, VALUE = 8, 512, 128, 64, 128


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(batch: int, num_rows: int) -> AttentionRows:
    table, positions = (_empty(batch, n, dtype=torch.int64) for n in (512, num_rows))
    return AttentionRows(table, positions, 16, _empty(batch * num_rows, dtype=torch.int64))


def attention() -> None:
    """Few and many rows are one kernel."""
    cache = _empty(100, 16, RANK + ROPE)
    for batch, num_rows in ((1, 1), (2, 16)):
        q = _empty(batch, num_rows, HEADS, RANK + ROPE)
        mla_attention(q, cache, _rows(batch, num_rows), 0.1, RANK)


def prefill() -> None:
    mla_prefill(_empty(1, 100, HEADS, RANK + ROPE), _empty(100, 16, RANK + ROPE), _rows(1, 100), 0.1, RANK)


def small_steps() -> None:
    for num_rows in (1, 16):
        q, angles = _empty(num_rows, HEADS, NOPE + ROPE), _empty(num_rows, ROPE)
        absorb_query(q, _empty(HEADS, RANK, NOPE), angles, angles)
        head_linear(_empty(num_rows, HEADS, RANK), _empty(HEADS, VALUE, RANK))
    rotate_query(q, angles, angles)
    kv = _empty(num_rows, 1536 + RANK + ROPE)[:, 1536:]
    index = _empty(num_rows, dtype=torch.int64)
    write_latent(kv, Norm(_empty(RANK), 1e-5), angles, angles, _empty(100, 16, RANK + ROPE), index)
    made, norms = _empty(num_rows, 1536 + RANK + ROPE), (Norm(_empty(1536), 1e-6), Norm(_empty(RANK), 1e-6))
    latent_rows(made, *norms, angles, angles, _empty(100, 16, RANK + ROPE), index)
