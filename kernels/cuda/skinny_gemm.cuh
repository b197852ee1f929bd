// y = x W^T for few rows of x (1 to 128), bound by the reading of W.
//
// Weights are the A operand of mma.m16n8k16 (16 weight rows), rows of x its B operand (8 rows: "n8 tile"). A thread holds
// 8 consecutive k of weight rows g and g + 8 (g = lane / 4, t = lane % 4, k = 32 chunk + 8 t ..) by 16-byte loads straight
// into registers: its words 0, 1 are the two k pairs of one MMA, words 2, 3 those of a second. That is a permutation of k
// within the chunk; x is read by the same one, so the sum is over the same products. The weight is packed so that a
// warp's load is 512 bytes in a row and its next one follows. DEPTH chunks of weights are in flight per thread.
//
// The sum, here and in wide_gemm.cuh: K is cut into equal parts of chunks (the last may be shorter) by the shape alone.
// A part is summed in the order of k by MMAs from zero; parts 2 i and 2 i + 1 are added, and these pairs in order. An
// MMA's column depends on no other column: a row's bits depend neither on how many rows travel with it nor on the kernel
// that their number chose. Here each warp of a CTA has one part.
//
// Weights do not depend on the kernel before: their first loads are issued before griddepcontrol.wait.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// CTAs: m_groups for each TM tiles. LOOP: fewer CTAs take several of these in turn, and the loads of the next are in
// flight while one ends; every warp's count of chunks is a multiple of DEPTH then.
template <int EPILOGUE, bool NORM, int NT, int TM, int DEPTH, int X_DEPTH, bool LOOP, int MAX_WARPS>
__device__ inline void skinny_gemm(const Params& p, float* shared) {
    constexpr bool PAIRS = EPILOGUE == GATE_UP || EPILOGUE == QKV;
    static_assert(DEPTH % X_DEPTH == 0, "a slot of x must not depend on the round");
    static_assert(!PAIRS || TM == 2, "gate and up, or both halves of a head: one 16-row tile each");
    constexpr int COLUMNS = 8 * NT;                // rows of x in this CTA
    constexpr int STRIDE = 16 * TM + 4;            // of the sums in shared memory; + 4: no bank conflicts
    constexpr int ROWS = PAIRS ? 16 : 16 * TM;     // outputs of a row of x
    constexpr int TILES = PAIRS ? 1 : TM;          // tiles of outputs
    constexpr int BATCH = NT == 1 && X_DEPTH < DEPTH && TM * DEPTH >= 8 ? 8 : 4;  // reads of sums; wide rows have many

    // Attention, behind q, k and v, reads older keys before it waits: it starts when all before this kernel is done.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    int tile = p.m_groups == 1 ? blockIdx.x : blockIdx.x / p.m_groups;
    const int m0 = (blockIdx.x - tile * p.m_groups) * COLUMNS;
    const int step = LOOP ? int(gridDim.x) : 0;  // LOOP: one group of rows

    // This warp's part of K.
    const int chunks = p.K / 32, first_chunk = warp * p.chunks_per_part;
    const int count = min(p.chunks_per_part, chunks - first_chunk);
    const int k0 = first_chunk * 32 + 8 * t;
    const int64_t next_tile = int64_t(chunks) * CHUNK;
    const bf16* w_at = p.weight + tile * TM * next_tile + int64_t(first_chunk) * CHUNK + 8 * lane;
    const uint64_t policy = weight_policy(p.evict_first != 0);

    uint4 w[DEPTH][TM][2];
#pragma unroll
    for (int u = 0; u < DEPTH; ++u) {
        if (u < count) {
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                w[u][i][0] = load_weight(w_at + i * next_tile + u * CHUNK, policy);
                w[u][i][1] = load_weight(w_at + i * next_tile + u * CHUNK + CHUNK / 2, policy);
            }
        }
    }
    uint4 scale[X_DEPTH];  // the norm's weight
    if (NORM) {
#pragma unroll
        for (int u = 0; u < X_DEPTH; ++u) {
            if (u < count) scale[u] = load_activation(p.norm_weight + k0 + 32 * u);
        }
    }

    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();

    const bf16* x_at = p.x + int64_t(m0 + g) * p.x_stride + k0;
    const int64_t x_step = 8 * p.x_stride;
    float rstd[NT];
    uint4 x[X_DEPTH][NT];

    for (bool first_tile = true;; first_tile = false) {
        if (first_tile || count > X_DEPTH) {  // else the slots still hold all of this warp's x
#pragma unroll
            for (int u = 0; u < X_DEPTH; ++u) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    x[u][j] = uint4{0, 0, 0, 0};  // rows that are not there
                    if (u < count && m0 + 8 * j + g < p.M) x[u][j] = load_activation(x_at + j * x_step + 32 * u);
                }
                if (LOOP && NORM && !first_tile) scale[u] = load_activation(p.norm_weight + k0 + 32 * u);
            }
        }
        Extra first_extra{0, 0, 0};
        if (EPILOGUE == ADD || EPILOGUE == QKV) {
            const int m = m0 + int(threadIdx.x) / ROWS;
            if (m < p.M && int(threadIdx.x) < COLUMNS * ROWS) {
                first_extra = load_extra<EPILOGUE>(p, m, place_of<EPILOGUE>(p, tile * TILES, threadIdx.x % ROWS));
            }
        }
        if (NORM && first_tile) {
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

        const bool more = LOOP && tile + step < p.tiles / TILES;
        const bf16* w_next = w_at + step * TM * next_tile - int64_t(count) * CHUNK;  // chunk `count` on
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
                            mma_16x8x16(sums[i][j], low.x, high.x, low.y, high.y, b.x, b.y);
                            mma_16x8x16(sums[i][j], low.z, high.z, low.w, high.w, b.z, b.w);
                        }
                    }
                    const int ahead = chunk + DEPTH;
                    if (ahead < count || more) {
                        const bf16* from = (LOOP && ahead >= count ? w_next : w_at) + int64_t(ahead) * CHUNK;
#pragma unroll
                        for (int i = 0; i < TM; ++i) {
                            w[u][i][0] = load_weight(from + i * next_tile, policy);
                            w[u][i][1] = load_weight(from + i * next_tile + CHUNK / 2, policy);
                        }
                    }
                    if (chunk + XD < count) {
                        if (NORM) scale[s] = load_activation(p.norm_weight + k0 + 32 * (chunk + XD));
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            if (m0 + 8 * j + g < p.M) x[s][j] = load_activation(x_at + j * x_step + 32 * (chunk + XD));
                        }
                    }
                }
            }
        }

        // Sums of the warps: shared[warp][row of x][weight row].
        float* mine = shared + warp * COLUMNS * STRIDE;
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    mine[(8 * j + 2 * t + e % 2) * STRIDE + 16 * i + g + 8 * (e / 2)] = sums[i][j][e];
                }
            }
        }
        __syncthreads();

        const int outputs = min(COLUMNS, p.M - m0) * ROWS;  // a multiple of 16
        for (int index = threadIdx.x; index < outputs; index += blockDim.x) {
            const int column = index / ROWS, row = index % ROWS, m = m0 + column;
            const float* at = shared + column * STRIDE + row;
            float part[MAX_WARPS], second_part[MAX_WARPS];
#pragma unroll
            for (int v = 0; v < MAX_WARPS; ++v) {  // all reads in flight
                part[v] = v < warps ? at[v * COLUMNS * STRIDE] : 0.0f;
                if (PAIRS) second_part[v] = v < warps ? at[v * COLUMNS * STRIDE + 16] : 0.0f;
            }
            float first = part[0], second = second_part[0];
#pragma unroll
            for (int v = 0; v < MAX_WARPS; v += 2) {
                const bool odd = v + 1 < MAX_WARPS && v + 1 < warps;
                const float pair = odd ? part[v] + part[v + 1] : part[v];
                first = v == 0 ? pair : v < warps ? first + pair : first;
                if (PAIRS) {
                    const float second_pair = odd ? second_part[v] + second_part[v + 1] : second_part[v];
                    second = v == 0 ? second_pair : v < warps ? second + second_pair : second;
                }
            }
            const Place place = place_of<EPILOGUE>(p, tile * TILES, row);
            Extra extra = first_extra;
            if ((EPILOGUE == ADD || EPILOGUE == QKV) && index >= int(blockDim.x)) {
                extra = load_extra<EPILOGUE>(p, m, place);
            }
            finish<EPILOGUE>(p, m, place, first, second, extra);
        }
        if (!LOOP || !more) break;
        tile += step;
        w_at += step * TM * next_tile;
        __syncthreads();  // the place of the sums is free again
    }
}

}  // namespace slipstream
