// y = x W^T for few rows of x (1 to 128), bound by the reading of W.
//
// Weights are the A operand of mma.m16n8k16 (16 weight rows), rows of x its B operand (8 rows: "n8 tile"). A thread holds
// 8 consecutive k of weight rows g and g + 8 (g = lane / 4, t = lane % 4, k = 32 chunk + 8 t ..): k pairs 0 and 1 are
// those of one MMA, 2 and 3 of a second. That is a permutation of k within the chunk; x is read by the same one, so the
// sum is over the same products. The weight is packed so that 16 bytes are the four registers of one MMA (else they
// would be moved), a warp's load is 512 bytes in a row and its next one follows. DEPTH chunks are in flight per thread.
//
// The sum, here and in bulk_gemm.cuh: chunk i belongs to part i mod P, P by the shape alone. A part is summed in the order
// of k by MMAs from zero; parts 2 i and 2 i + 1 are added, and these pairs in order. An MMA's column depends on no other
// column: a row's bits depend neither on how many rows travel with it nor on the kernel that their number chose. Each
// warp of a CTA has one part.
//
// Weights do not depend on the kernel before: their first loads are issued before griddepcontrol.wait.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// The extras of a thread's outputs from its `first` on, all on the way at once.
template <int EPILOGUE, int NT, int TM, int COUNT>
__device__ inline void load_extras(const Params& p, int m0, int tile, int first, Extra (&extras)[COUNT]) {
    constexpr int ROWS = TM * TILE_OUTPUTS<EPILOGUE>;
#pragma unroll
    for (int b = 0; b < COUNT; ++b) {
        extras[b] = Extra{0, 0, 0};
        if (EPILOGUE == ADD || EPILOGUE == QKV) {
            const int index = threadIdx.x + (first + b) * blockDim.x, m = m0 + index / ROWS;
            if (m < p.M && index < 8 * NT * ROWS) {
                extras[b] = load_extra<EPILOGUE>(p, m, place_of<EPILOGUE>(p, tile, index % ROWS));
            }
        }
    }
}

// finish_tiles by all threads of the CTA. `extras`: of a thread's first outputs; those of the others are asked for as
// many at a time, so that their latency is not added once for each.
template <int EPILOGUE, int NT, int TM, int MAX_WARPS, int COUNT>
__device__ inline void finish_rows(const Params& p, const float* shared, int warps, int m0, int tile,
                                   Extra (&extras)[COUNT]) {
    constexpr int COLUMNS = 8 * NT, STRIDE = 16 * TM + 4, OUTPUTS = TILE_OUTPUTS<EPILOGUE>, ROWS = TM * OUTPUTS;
    const int outputs = min(COLUMNS, p.M - m0) * ROWS;  // a multiple of 16, or pairs
    for (int first = 0; first * int(blockDim.x) < outputs; first += COUNT) {
        if (first > 0) load_extras<EPILOGUE, NT, TM, COUNT>(p, m0, tile, first, extras);
#pragma unroll
        for (int b = 0; b < COUNT; ++b) {
            const int index = threadIdx.x + (first + b) * blockDim.x;
            if (index < outputs) {
                const int column = index / ROWS, row = index % ROWS;
                const float* at = shared + column * STRIDE + 16 * (row / OUTPUTS) + row % OUTPUTS;
                const float low = sum_parts<MAX_WARPS, COLUMNS * STRIDE>(at, warps);
                const float high = PAIRED<EPILOGUE> ? sum_parts<MAX_WARPS, COLUMNS * STRIDE>(at + 8, warps) : 0.0f;
                finish<EPILOGUE>(p, m0 + column, place_of<EPILOGUE>(p, tile, row), low, high, extras[b]);
            }
        }
    }
}

// CTAs: m_groups for each TM tiles.
template <int EPILOGUE, bool NORM, int NT, int TM, int DEPTH, int X_DEPTH, int MAX_WARPS>
__device__ inline void skinny_gemm(const Params& p, float* shared) {
    static_assert(DEPTH % X_DEPTH == 0, "a slot of x must not depend on the round");
    constexpr int BATCH = NT == 1 && X_DEPTH < DEPTH && TM * DEPTH >= 8 ? 8 : 4;  // reads of sums; wide rows have many
    constexpr int EARLY = NT == 2 || NT == 4 ? NT : 1;  // outputs of a thread whose extras are asked for at once

    // Attention, behind q, k and v, reads older keys before it waits: it starts when all before this kernel is done.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int unit = p.m_groups == 1 ? blockIdx.x : blockIdx.x / p.m_groups, tile = TM * unit;
    const int m0 = (blockIdx.x - unit * p.m_groups) * 8 * NT;

    // This warp's part of K: chunks warp, warp + warps, ...
    const int chunks = p.K / 32;
    const int count = p.chunks_per_part - ((p.chunks_per_part - 1) * warps + warp < chunks ? 0 : 1);
    const int k0 = 32 * warp + 8 * t, k_step = 32 * warps, w_step = warps * CHUNK;
    const int64_t next_tile = int64_t(chunks) * CHUNK;
    const bf16* w_at = p.weight + tile * next_tile + warp * CHUNK + 8 * lane;
    const uint64_t policy = weight_policy(p.evict_first != 0);

    uint4 w[DEPTH][TM][2];
#pragma unroll
    for (int u = 0; u < DEPTH; ++u) {
        if (u < count) {
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                w[u][i][0] = load_weight(w_at + i * next_tile, policy);
                w[u][i][1] = load_weight(w_at + i * next_tile + CHUNK / 2, policy);
            }
        }
        w_at += w_step;
    }
    const bf16* scale_at = p.norm_weight + k0;
    uint4 scale[X_DEPTH];  // the norm's weight
    if (NORM) {
#pragma unroll
        for (int u = 0; u < X_DEPTH; ++u) {
            if (u < count) scale[u] = load_activation(scale_at);
            scale_at += k_step;
        }
    }

    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();

    const bf16* x_at = p.x + int64_t(m0 + g) * p.x_stride + k0;
    const int64_t x_step = 8 * p.x_stride;
    uint4 x[X_DEPTH][NT];
#pragma unroll
    for (int u = 0; u < X_DEPTH; ++u) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            x[u][j] = uint4{0, 0, 0, 0};  // rows that are not there
            if (u < count && m0 + 8 * j + g < p.M) x[u][j] = load_activation(x_at + j * x_step);
        }
        x_at += k_step;
    }
    Extra extras[EARLY];
    load_extras<EPILOGUE, NT, TM, EARLY>(p, m0, tile, 0, extras);
    float rstd[NT];
    if (NORM) {
#pragma unroll
        for (int j = 0; j < NT; ++j) rstd[j] = row_rstd<BATCH>(p, m0 + 8 * j + g, t);
    }

    float sums[TM][NT][4];
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
        }
    }
    for (int round = 0; round < count; round += DEPTH) {
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            const int chunk = round + u;
            if (chunk < count) {
                constexpr int XD = X_DEPTH;
                const int s = u % XD;
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    const uint4 b = NORM ? normed(x[s][j], rstd[j], scale[s]) : x[s][j];
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        const uint4 low = w[u][i][0], high = w[u][i][1];
                        mma_16x8x16(sums[i][j], low.x, low.y, low.z, low.w, b.x, b.y);
                        mma_16x8x16(sums[i][j], high.x, high.y, high.z, high.w, b.z, b.w);
                    }
                }
                if (chunk + DEPTH < count) {
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        w[u][i][0] = load_weight(w_at + i * next_tile, policy);
                        w[u][i][1] = load_weight(w_at + i * next_tile + CHUNK / 2, policy);
                    }
                    w_at += w_step;
                }
                if (chunk + XD < count) {
                    if (NORM) {
                        scale[s] = load_activation(scale_at);
                        scale_at += k_step;
                    }
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        if (m0 + 8 * j + g < p.M) x[s][j] = load_activation(x_at + j * x_step);
                    }
                    x_at += k_step;
                }
            }
        }
    }
    put_sums<NT, TM>(shared, warp, lane, sums);
    __syncthreads();
    finish_rows<EPILOGUE, NT, TM, MAX_WARPS, EARLY>(p, shared, warps, m0, tile, extras);
}

}  // namespace slipstream
