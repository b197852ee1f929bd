"""The small steps around latent attention: the cells of new rows, the query of every head in the latents' space."""

import torch

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.rotary import apply_rotary
from slipstream.kernels.stream import Norm


def write_latent(
    kv: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, write_index: torch.Tensor
) -> None:
    """Norms the latents, rotates the rope keys, and stores both in their cells, in place.

    Args:
        kv: [M, kv_rank + rope_dim] as `kv_a_proj_with_mqa` makes it; a view with another row stride will do.
        norm: of the latent (`kv_a_layernorm`).
        cos, sin: [M, rope_dim] of the rows' positions.
        cache: [num_blocks, block_size, kv_rank + rope_dim].
        write_index: [M] int64, the cell of each row in the flattened cache.
    """
    if on_gpu(kv):
        from slipstream.kernels.gpu import latent_rows as gpu

        gpu.write_latent(kv, norm, cos, sin, cache, write_index)
        return
    kv_rank = norm.weight.shape[0]
    latent = rms_norm(kv[:, :kv_rank], norm.weight, norm.eps)  # [M, kv_rank]
    rope = apply_rotary(kv[:, None, kv_rank:], cos, sin)[:, 0]  # [M, 1, rope] -> [M, rope]
    cache.flatten(0, 1).index_copy_(0, write_index, torch.cat((latent, rope), dim=1))  # [cells, kv_rank + rope]


def latent_rows(
    made: torch.Tensor,
    query_norm: Norm,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    write_index: torch.Tensor,
) -> torch.Tensor:
    """`write_latent` of the last columns, and the norm of the first ones, from which queries are made.

    Args:
        made: [M, q_rank + kv_rank + rope_dim].
        query_norm: of the first q_rank (`q_a_layernorm`).
        norm, cos, sin, cache, write_index: of `write_latent`.

    Returns:
        The normed first columns [M, q_rank].
    """
    if on_gpu(made):
        from slipstream.kernels.gpu import latent_rows as gpu

        return gpu.latent_rows(made, query_norm, norm, cos, sin, cache, write_index)
    width = query_norm.weight.shape[0]
    write_latent(made[:, width:], norm, cos, sin, cache, write_index)
    return rms_norm(made[:, :width], query_norm.weight, query_norm.eps)


def rotate_query(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """q [M, H, nope + rope] with its last columns, as many as cos [M, rope] has, rotated; for `mla_prefill`."""
    if on_gpu(q):
        from slipstream.kernels.gpu import latent_rows as gpu

        return gpu.rotate_query(q, cos, sin)
    nope = q.shape[-1] - cos.shape[-1]
    return torch.cat((q[..., :nope], apply_rotary(q[..., nope:], cos, sin)), dim=-1)


def absorb_query(q: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries in the latents' space, so that a dot product with a cell is that with the expanded key.

    Args:
        q: [M, H, nope + rope], not rotated yet.
        key: [H, kv_rank, nope], of each head the transpose of its key rows of `kv_b_proj`.
        cos, sin: [M, rope] of the rows' positions.

    Returns:
        [M, H, kv_rank + rope].
    """
    if on_gpu(q):
        from slipstream.kernels.gpu import latent_rows as gpu

        return gpu.absorb_query(q, key, cos, sin)
    nope = key.shape[2]
    return torch.cat((head_linear(q[..., :nope], key), apply_rotary(q[..., nope:], cos, sin)), dim=-1)
