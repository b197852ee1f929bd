"""The core of all matrix products: acc[n, m] = sum over k of W[n, k] * norm(x)[m, k], fp32.

Weight rows lie on the M side of the matrix unit, rows of x on its N side, so that 8 rows of x waste nothing. The order
in which a row's sum over k is taken hangs on the weight's shape alone:

- `SPLIT` warps each take an equal share of the columns and meet at the end (`tl.sum` over the warps);
- a reduction that is no matrix product is one of `squares.py`.
"""

import triton
import triton.language as tl

from slipstream.kernels.gpu.launch import INTERPRET
from slipstream.kernels.gpu.squares import norm_constants, normalise, normalise_tile, row_squares, rstd_of

# Triton's interpreter computes bf16 on its bit patterns: there, products are taken in fp32.
_INTERPRET = tl.constexpr(INTERPRET)
_MOST_COLUMNS = tl.constexpr(256)  # of one resident load of a warp


@triton.constexpr_function
def share_of(num_columns, split):
    """Columns of one warp when the whole row is resident: a multiple of 16."""
    split = max(1, split)
    return (num_columns + 16 * split - 1) // (16 * split) * 16


@triton.constexpr_function
def chunk_widths(share, most):
    """A warp's columns as powers of two, widest first."""
    widths = []
    while share:
        widths.append(min(most, 1 << (share.bit_length() - 1)))
        share -= widths[-1]
    return widths


@triton.constexpr_function
def is_even(num_columns, split):
    """Whether the warps' shares are the whole row and no more."""
    return share_of(num_columns, split) * max(1, split) == num_columns


@triton.constexpr_function
def num_chunks(share, most):
    return len(chunk_widths(share, most))


@triton.constexpr_function
def chunk_width(share, most, i):
    return chunk_widths(share, most)[i]


@triton.constexpr_function
def chunk_start(share, most, i, split):
    """First column of the chunks number i of all warps."""
    return max(1, split) * sum(chunk_widths(share, most)[:i])


@triton.jit
def mul(w, x, acc):
    """acc + w x for tiles [(S,) n, k] and [(S,) k, m]."""
    if _INTERPRET:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def columns(start, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Indices of the columns of a step: [S, WIDTH], warp s behind warp s - 1; or [WIDTH]."""
    k = start + tl.arange(0, WIDTH)
    if SPLIT > 1:
        k = k[None, :] + tl.arange(0, SPLIT)[:, None] * WIDTH  # [W] -> [S, W]
    return k


@triton.jit
def weight_tile(w_ptr, n, k, K: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr):
    """W[n, k]: [S, n, k], or [n, k]."""
    row = n.to(tl.int64) * K
    if SPLIT > 1:
        at = row[None, :, None] + k[:, None, :]  # [n], [S, k] -> [S, n, k]
        inside = k[:, None, :] < K
    else:
        at = row[:, None] + k[None, :]  # [n], [k] -> [n, k]
        inside = k[None, :] < K
    if EVEN:
        tile = tl.load(w_ptr + at)
    else:
        tile = tl.load(w_ptr + at, mask=inside, other=0.0)
    return tile


@triton.jit
def row_tile(x_ptr, x_stride, m, num_rows, k, K: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr):
    """x[m, k] turned: [S, k, m], or [k, m]; rows beyond the last are zeros."""
    row = m.to(tl.int64) * x_stride
    if SPLIT > 1:
        at = row[None, None, :] + k[:, :, None]  # [m], [S, k] -> [S, k, m]
        inside = (m < num_rows)[None, None, :]
        if not EVEN:
            inside = inside & (k < K)[:, :, None]
    else:
        at = row[None, :] + k[:, None]  # [m], [k] -> [k, m]
        inside = (m < num_rows)[None, :]
        if not EVEN:
            inside = inside & (k < K)[:, None]
    return tl.load(x_ptr + at, mask=inside, other=0.0)


@triton.jit
def prefetch(w_ptr, n, K: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr):
    """Ask the first COLUMNS columns of weight rows n into the L2 cache, each thread an equal share of them."""
    SHARES: tl.constexpr = max(1, THREADS // n.shape[0])
    WIDTH: tl.constexpr = COLUMNS // SHARES
    at = (n.to(tl.int64) * K)[:, None] + (tl.arange(0, SHARES) * WIDTH)[None, :]  # [n] -> [n, shares]
    num_bytes = tl.full(at.shape, WIDTH * (w_ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [w_ptr + at, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def resident_weights(w_ptr, n, K: tl.constexpr, SPLIT: tl.constexpr):
    """All columns of weight rows n, as the chunks of `chunk_widths`."""
    SHARE: tl.constexpr = share_of(K, SPLIT)
    chunks = ()
    for i in tl.static_range(num_chunks(SHARE, _MOST_COLUMNS)):
        k = columns(chunk_start(SHARE, _MOST_COLUMNS, i, SPLIT), chunk_width(SHARE, _MOST_COLUMNS, i), SPLIT)
        chunks = chunks + (weight_tile(w_ptr, n, k, K, is_even(K, SPLIT), SPLIT),)  # type: ignore[assignment] # noqa: RUF005
    return chunks


@triton.jit
def resident_norm(norm_ptr, K: tl.constexpr, SPLIT: tl.constexpr):
    """The norm's weight, cut as `resident_weights`."""
    SHARE: tl.constexpr = share_of(K, SPLIT)
    chunks = ()
    for i in tl.static_range(num_chunks(SHARE, _MOST_COLUMNS)):
        k = columns(chunk_start(SHARE, _MOST_COLUMNS, i, SPLIT), chunk_width(SHARE, _MOST_COLUMNS, i), SPLIT)
        chunks = chunks + (norm_constants(norm_ptr, k, K, is_even(K, SPLIT)),)  # type: ignore[assignment] # noqa: RUF005
    return chunks


@triton.jit
def zeros(n, m, SPLIT: tl.constexpr):
    """An accumulator [S, n, m], or [n, m]."""
    if SPLIT > 1:
        acc = tl.zeros((SPLIT, n.shape[0], m.shape[0]), tl.float32)
    else:
        acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    return acc


@triton.jit
def resident_rows(x_ptr, x_stride, m, num_rows, K: tl.constexpr, SPLIT: tl.constexpr):
    """Rows m, cut as `resident_weights`."""
    SHARE: tl.constexpr = share_of(K, SPLIT)
    chunks = ()
    for i in tl.static_range(num_chunks(SHARE, _MOST_COLUMNS)):
        k = columns(chunk_start(SHARE, _MOST_COLUMNS, i, SPLIT), chunk_width(SHARE, _MOST_COLUMNS, i), SPLIT)
        x = row_tile(x_ptr, x_stride, m, num_rows, k, K, is_even(K, SPLIT), SPLIT)
        chunks = chunks + (x,)  # type: ignore[assignment] # noqa: RUF005
    return chunks


@triton.jit
def pinned(x):
    """x, which no pass takes to shared memory before this point: so all loads above it are in flight at once."""
    if _INTERPRET or x.dtype.primitive_bitwidth != 16:
        y = x
    else:
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return y


@triton.jit
def pinned_all(chunks):
    pins = ()
    for i in tl.static_range(len(chunks)):
        pins = pins + (pinned(chunks[i]),)  # type: ignore[assignment] # noqa: RUF005
    return pins


@triton.jit
def start(
    w_ptr,
    n0,
    n1,
    norm_ptr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    SETTLES: tl.constexpr = False,
):
    """Let the next kernel start, ask for weights, and wait for the kernel before: what a caller reads of rows or state
    it reads behind this call, and before `finish`, whose work the loads then hide behind.

    Returns what `finish` wants: resident weight rows n0, n1 and the norm's weight; nothing where they come in steps.
    """
    w0, w1, constants = (0,), (0,), (0,)
    if PDL:  # noqa: SIM102
        if not SETTLES:
            tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        prefetch(w_ptr, n0, K, PREFETCH, 32 * WARPS)
        if PAIRED:
            prefetch(w_ptr, n1, K, PREFETCH, 32 * WARPS)
    if BLOCK_K == 0:
        w0 = resident_weights(w_ptr, n0, K, SPLIT)
        if PAIRED:
            w1 = resident_weights(w_ptr, n1, K, SPLIT)
        if NORM:
            constants = resident_norm(norm_ptr, K, SPLIT)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if SETTLES:  # the next kernel finds all done that came before this one (launch.py)
            tl.extra.cuda.gdc_launch_dependents()
    return w0, w1, constants


@triton.jit
def row_by_row(
    held,
    x_ptr,
    x_stride,
    m,
    num_rows,
    n0,
    norm_ptr,
    eps,
    K: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
):
    """`finish` without the matrix unit, one row of x after the other: short for one row, long for many."""
    acc0 = zeros(n0, m, 1)
    acc1 = acc0
    first = tl.program_id(0) * m.shape[0]  # row of this program
    NUM: tl.constexpr = num_chunks(share_of(K, 1), _MOST_COLUMNS)
    for r in tl.static_range(m.shape[0]):
        row_ptr = x_ptr + (first + r).to(tl.int64) * x_stride
        x = resident_row(row_ptr, first + r < num_rows, K)
        if NORM:
            k = tl.arange(0, chunk_width(2 * K - 1, 2 * K, 0))  # the power of two that holds K
            whole = tl.load(row_ptr + k, mask=(first + r < num_rows) & (k < K), other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
        sum0 = tl.zeros(n0.shape, tl.float32)
        sum1 = sum0
        for i in tl.static_range(NUM):
            xi = x[i]
            if NORM:
                xi = normalise(xi, rstd, held[2][i])
            x32 = xi.to(tl.float32)[None, :]  # [1, k]
            sum0 += tl.sum(held[0][i].to(tl.float32) * x32, 1)  # [n, k] -> [n]
            if PAIRED:
                sum1 += tl.sum(held[1][i].to(tl.float32) * x32, 1)
        here = (m == first + r)[None, :]
        acc0 = tl.where(here, sum0[:, None], acc0)
        if PAIRED:
            acc1 = tl.where(here, sum1[:, None], acc1)
    if not PAIRED:
        acc1 = acc0
    return acc0, acc1


@triton.jit
def resident_row(row_ptr, exists, K: tl.constexpr):
    """One row, cut as `resident_weights` for SPLIT = 1."""
    SHARE: tl.constexpr = share_of(K, 1)
    chunks = ()
    for i in tl.static_range(num_chunks(SHARE, _MOST_COLUMNS)):
        k = columns(chunk_start(SHARE, _MOST_COLUMNS, i, 1), chunk_width(SHARE, _MOST_COLUMNS, i), 1)
        x = tl.load(row_ptr + k, mask=exists & (k < K), other=0.0)
        chunks = chunks + (x,)  # type: ignore[assignment] # noqa: RUF005
    return chunks


@triton.jit
def finish(
    held,
    x_ptr,
    x_stride,
    m,
    num_rows,
    w_ptr,
    n0,
    n1,
    norm_ptr,
    eps,
    sumsq_ptr,
    num_parts,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
    SUMSQ: tl.constexpr,
):
    """acc[n0, m] and, when PAIRED, acc[n1, m] (else the first again)."""
    acc0 = zeros(n0, m, SPLIT)
    acc1 = acc0
    if SPLIT == 0:
        acc0, acc1 = row_by_row(held, x_ptr, x_stride, m, num_rows, n0, norm_ptr, eps, K, PAIRED, NORM)
    elif BLOCK_K == 0:
        SHARE: tl.constexpr = share_of(K, SPLIT)
        rows = resident_rows(x_ptr, x_stride, m, num_rows, K, SPLIT)
        if NORM:
            squares = row_squares(x_ptr, x_stride, m, num_rows, sumsq_ptr, num_parts, K, SUMSQ)
        # While rows are on their way, weights go to shared memory.
        w0 = pinned_all(held[0])
        if PAIRED:
            w1 = pinned_all(held[1])
        if NORM:
            rstd = rstd_of(squares, eps, K)
        for i in tl.static_range(num_chunks(SHARE, _MOST_COLUMNS)):
            x = pinned(rows[i])
            if NORM:
                x = normalise_tile(x, rstd, held[2][i], SPLIT)
            acc0 = mul(w0[i], x, acc0)
            if PAIRED:
                acc1 = mul(w1[i], x, acc1)
    else:
        EVEN: tl.constexpr = K % BLOCK_K == 0
        if NORM:
            rstd = rstd_of(row_squares(x_ptr, x_stride, m, num_rows, sumsq_ptr, num_parts, K, SUMSQ), eps, K)
        for step in range(0, K, BLOCK_K):
            k = columns(step, BLOCK_K // SPLIT, SPLIT)
            w = weight_tile(w_ptr, n0, k, K, EVEN, SPLIT)
            x = row_tile(x_ptr, x_stride, m, num_rows, k, K, EVEN, SPLIT)
            if NORM:
                x = normalise_tile(x, rstd, norm_constants(norm_ptr, k, K, EVEN), SPLIT)
            acc0 = mul(w, x, acc0)
            if PAIRED:
                acc1 = mul(weight_tile(w_ptr, n1, k, K, EVEN, SPLIT), x, acc1)
    if SPLIT > 1:
        acc0 = tl.sum(acc0, 0)  # [S, n, m] -> [n, m]
        if PAIRED:
            acc1 = tl.sum(acc1, 0)
    if not PAIRED:
        acc1 = acc0
    return acc0, acc1
