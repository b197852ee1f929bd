"""The forms that a weight [N, K] of a linear layer comes in. Every product takes each of them."""

import torch

from slipstream.kernels.cuda.pack import PackedWeight, unpack
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.int4 import matrix as int4_matrix

# A tensor as checkpoints have it; the same bits in the order of the CUDA C++ kernels; 4-bit integers and scales.
Weight = torch.Tensor | PackedWeight | Int4Weight


def as_matrix(weight: Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[N, K], whatever the form.

    Args:
        weight: a tensor is handed back as it is, where it has the dtype.
        dtype: None: that of the weight; of INT4 weights fp32, in which they are exact.
    """
    if isinstance(weight, Int4Weight):
        matrix = int4_matrix(weight)
    else:
        matrix = unpack(weight) if isinstance(weight, PackedWeight) else weight
    return matrix if dtype is None else matrix.to(dtype)
