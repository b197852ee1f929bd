"""Gumbel noise as a hash of (request seed, choice index, absolute position, global token id).

It is the same on every device and every vocabulary shard, whatever else is in the batch, and however the position was
reached. The hash is integer arithmetic that wraps around: a 64-bit mix makes the key of a row, a 32-bit mix with three
multiplications spreads it over the vocabulary (14 integer operations an id). Logarithms are taken in fp64 and rounded
to fp32, so that the last-bit differences between math libraries vanish.
"""

import torch

# Multipliers of the 64-bit mix (SplitMix64) and of the 32-bit mix (triple32's), written as signed integers.
_MUL64_A = 0xBF58476D1CE4E5B9 - 2**64
_MUL64_B = 0x94D049BB133111EB - 2**64
_STEP64 = 0x9E3779B97F4A7C15 - 2**64
_MUL32_A = 0xED5AD4BB - 2**32
_MUL32_B = 0xAC4C1B51 - 2**32
_MUL32_C = 0x31848BAB

# Noise is made this many values at a time (at least a row), so that the fp64 values stay in the cache.
_NOISE_VALUES = 65536


def gumbel_noise(
    seed: torch.Tensor, choice: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of its four inputs.

    Args:
        seed, choice: [B] int64.
        positions: [B, R] int64, absolute position of the token being chosen.
        token_ids: [V] int64 global token ids (the whole vocabulary, a shard of it, or a draft's mapped ids), < 2^32.

    Returns:
        [B, R, V] fp32, within about (-3.14, 22.9); the column of an id does not depend on the other ids.
    """
    key = _mix64(_mix64(_mix64(seed)[:, None] + choice[:, None]) + positions)  # [B] -> [B, 1] -> [B, R]
    low, high = _signed32(key).reshape(-1), _signed32(key >> 32).reshape(-1)  # [B, R] -> [B * R] each
    ids = _premix32(_signed32(token_ids))  # [V]
    out = torch.empty(*positions.shape, token_ids.shape[0], dtype=torch.float32, device=token_ids.device)
    flat = out.view(-1, token_ids.shape[0])  # [B, R, V] -> [B * R, V]
    rows = max(1, _NOISE_VALUES // token_ids.shape[0])
    for start in range(0, flat.shape[0], rows):
        part = slice(start, start + rows)
        flat[part] = _gumbel(_mix32(ids, low[part, None], high[part, None]))
    return out


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step and output mix on int64, wrapping."""
    x = x + _STEP64
    x = (x ^ _shift_right(x, 30)) * _MUL64_A
    x = (x ^ _shift_right(x, 27)) * _MUL64_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of a signed tensor: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (x.element_size() * 8 - bits)) - 1)


def _signed32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values as int32."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _premix32(ids: torch.Tensor) -> torch.Tensor:
    """Spread consecutive ids over all 32 bits, once a call and shared by its rows: [V] int32 -> [V] int32."""
    x = (ids ^ _shift_right(ids, 16)) * _MUL32_C
    x = (x ^ _shift_right(x, 15)) * _MUL32_B
    return x ^ _shift_right(x, 16)


def _mix32(ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Keyed bijection of premixed ids, so that two ids of a row never share a value.

    Args: ids [V] int32; low, high [M, 1] int32, the halves of each row's key. Returns: [M, V] int32.
    """
    x = (ids ^ low).mul_(_MUL32_A)
    x.bitwise_xor_(_shift_right(x, 11)).add_(high).mul_(_MUL32_B)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(_MUL32_C)
    return x.bitwise_xor_(_shift_right(x, 14))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """int32 -> fp32 of the same shape: -log(-log(u)), u the midpoint of one of 2^32 equal cells, never 0 or 1."""
    uniform = bits.double().mul_(2.0**-32).add_(0.5 + 2.0**-33)  # exact
    return uniform.log_().neg_().log_().neg_().float()
