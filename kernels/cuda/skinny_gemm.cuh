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

// CTAs: m_groups for each TM tiles.
template <int EPILOGUE, bool NORM, int NT, int TM, int DEPTH, int X_DEPTH, int MAX_WARPS>
__device__ inline void skinny_gemm(const Params& p, float* shared) {
    static_assert(DEPTH % X_DEPTH == 0, "a slot of x must not depend on the round");
    constexpr int BATCH = NT == 1 && X_DEPTH < DEPTH && TM * DEPTH >= 8 ? 8 : 4;  // reads of sums; wide rows have many

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
    const Extra first_extra = load_first_extra<EPILOGUE, NT, TM>(p, m0, tile);
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
    finish_tiles<EPILOGUE, NT, TM, MAX_WARPS>(p, shared, warps, blockDim.x, m0, tile, first_extra);
}

}  // namespace slipstream
