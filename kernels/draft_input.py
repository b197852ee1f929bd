"""What the draft's layer reads: the token's embedding beside the feature, each through its norm."""

import torch
import torch.nn.functional as F

from slipstream.kernels.dispatch import on_gpu
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.stream import Norm


def draft_input(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    g: torch.Tensor,
    e_norm: Norm,
    g_norm: Norm,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[norm(e); norm(g)] of every row, and the residual that the layer adds to.

    Args:
        token_ids: [M] int64, each below V.
        table: [V, h], contiguous.
        g: [M, h], the feature.
        e_norm, g_norm: of the embedding and of the feature.
        norm_before_residual: the residual is norm(g), not g.

    Returns:
        (x [M, 2h], residual [M, h]).
    """
    if on_gpu(g):
        from slipstream.kernels.gpu import draft_input as gpu

        return gpu.draft_input(token_ids, table, g, e_norm, g_norm, norm_before_residual)
    normed = rms_norm(g, g_norm.weight, g_norm.eps)
    e = rms_norm(F.embedding(token_ids, table), e_norm.weight, e_norm.eps)
    return torch.cat((e, normed), dim=-1), normed if norm_before_residual else g  # 2 x [M, h] -> [M, 2h]
