"""`kernels.gumbel_noise` as functions for Triton kernels; a score and its token id compared as one integer."""

import triton
import triton.language as tl


@triton.jit
def _mix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, choice, position):
    """Key of a row, from int64 values: uint64."""
    return _mix64(_mix64(_mix64(seed.to(tl.uint64)) + choice.to(tl.uint64)) + position.to(tl.uint64))


@triton.jit
def gumbel(key, ids):
    """fp32 noise of integer token ids under a row's key."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x31848BAB
    x = (x ^ (x >> 15)) * 0xAC4C1B51
    x ^= x >> 16
    x = (x ^ low) * 0xED5AD4BB
    x = ((x ^ (x >> 11)) + high) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    x ^= x >> 14
    uniform = x.to(tl.int32, bitcast=True).to(tl.float64) * 2.3283064365386963e-10 + 0.5000000001164153  # exact
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def ordered(x):
    """fp32 -> int32 in the same order; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(score, ids):
    """A score and its token id as one int64: the largest is the best score, of equals the lowest id."""
    return (ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def unpack_id(packed):
    """The id of a packed pair, int64."""
    return 0xFFFFFFFF - (packed & 0xFFFFFFFF)
