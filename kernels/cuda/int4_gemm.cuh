// y = x W^T over INT4 weights (kernels/int4.py has their order; int4_parts.cuh the sum) by loads into registers: for more
// rows than int4_bulk.cuh takes, and for cards without bulk copies.
//
// A block is 32 weight rows: two A operands of mma.m16n8k16. Of each chunk of 32 k a lane (g = lane / 4, t = lane % 4)
// loads 16 bytes: four words, word q with the k pair 8 t + 2 q of rows g, g + 8, g + 16, g + 24. So words 0, 1 are the
// registers of one MMA of either tile, words 2, 3 those of a second, and a row of x is read 16 bytes a lane.
//
// Weights do not depend on the kernel before: their first loads are issued before griddepcontrol.wait.
#pragma once
#include <int4_parts.cuh>

namespace slipstream {

template <int EPILOGUE, bool NORM, int GROUP, int NT, int DEPTH, bool STAGED>
__device__ inline void int4_gemm(const Int4Params& all, float* shared) {
    static_assert(GROUP == 32 || GROUP == 128, "a group is a chunk or a quad");
    constexpr int COLUMNS = 8 * NT;  // rows of x in this CTA
    const Params& p = all.common;

    // Attention, behind q, k and v, reads older keys before it waits: it starts when all before this kernel is done.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    int block = p.m_groups == 1 ? blockIdx.x : blockIdx.x / p.m_groups;
    const int m0 = (blockIdx.x - block * p.m_groups) * COLUMNS;
    // STAGED: fewer CTAs take several blocks in turn: their rows of x are staged already, and the loads of the next
    // block are in flight while one ends. Every warp's count of quads is a multiple of DEPTH where that happens.
    const int step = STAGED ? int(gridDim.x) : 0, blocks = p.tiles / BLOCK_TILES;
    const int quads = p.K / 128, count = (quads - warp + warps - 1) / warps;  // of a row, of this warp's part

    const int64_t at = int64_t(block) * quads + warp;
    const bf16* w_at = p.weight + at * QUAD + 8 * lane;
    const int64_t to_next = int64_t(step) * quads;  // quads from a block to this CTA's next one
    // Scales of a quad: with groups of 32 lane t has those of its chunk t, with groups of 128 every lane has the one.
    const int my_chunk = GROUP == 32 ? t : 0;
    constexpr int SCALES = 4096 / GROUP;  // of a quad
    const bf16* s_at = all.scales + at * SCALES + my_chunk * 32 + 4 * g;
    const uint64_t policy = weight_policy(p.evict_first != 0);

    uint4 w[DEPTH][4];
    uint2 s[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (d < count) {
#pragma unroll
            for (int u = 0; u < 4; ++u) w[d][u] = load_weight(w_at + d * warps * QUAD + u * (QUAD / 4), policy);
            s[d] = load_scales(s_at + d * warps * SCALES);
        }
    }

    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();

    bf16* staged = reinterpret_cast<bf16*>(shared);
    const int k0 = warp * 128 + 8 * t;
    const bf16* x_at = p.x + int64_t(m0 + g) * p.x_stride + k0;
    float rstd[NT];
    uint4 x[NT], scale;  // of one chunk; scale: the norm's weight
    if (STAGED) {
        stage<NORM>(p, m0, min(COLUMNS, p.M - m0), warp, warps, 16 * count, lane, staged, all.staged_stride);
    } else {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            x[j] = uint4{0, 0, 0, 0};  // rows that are not there
            if (m0 + 8 * j + g < p.M) x[j] = load_activation(x_at + 8 * j * p.x_stride);
        }
        if (NORM) {
            scale = load_activation(p.norm_weight + k0);
#pragma unroll
            for (int r = 0; r < COLUMNS; r += BATCH) {
                if (m0 + r < p.M) {
                    float values[BATCH];
                    warp_rstd(p, m0 + r, p.M - m0 - r, lane, values);
#pragma unroll
                    for (int a = 0; a < BATCH; ++a) {
                        if (g == r % 8 + a) rstd[r / 8] = values[a];
                    }
                }
            }
        }
    }

    for (int turn = 0;; ++turn) {
        const bool next = block + step < blocks && STAGED;
        const int columns = min(COLUMNS, p.M - m0);
        const Extra first_extra = first_extra_of<EPILOGUE>(p, m0, columns, block);
        float sums[2][NT][4], partial[2][NT][4];
        clear(sums);

        for (int round = 0; round < count; round += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int quad = round + d;
                if (quad < count) {
                    // What takes this quad's place: a later one of the block, or one of the next block.
                    const int ahead = quad + DEPTH;
                    const bool more = ahead < count || next;
                    const int64_t from = ahead < count ? ahead * warps : to_next + (ahead - count) * warps;
#pragma unroll
                    for (int u = 0; u < 4; ++u) {
                        const int k = 128 * warps * quad + 32 * u, k_next = u < 3 ? k + 32 : 128 * warps * (quad + 1);
                        uint4 b[NT];
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            if (STAGED) {
                                b[j] = uint4{0, 0, 0, 0};
                                if (m0 + 8 * j + g < p.M) {
                                    b[j] = load_shared(staged + (8 * j + g) * all.staged_stride + k0 + k);
                                }
                            } else {
                                b[j] = NORM ? normed(x[j], rstd[j], scale) : x[j];
                            }
                        }
                        if (!STAGED && (u < 3 || quad + 1 < count)) {
                            if (NORM) scale = load_activation(p.norm_weight + k0 + k_next);
#pragma unroll
                            for (int j = 0; j < NT; ++j) {
                                if (m0 + 8 * j + g < p.M) x[j] = load_activation(x_at + 8 * j * p.x_stride + k_next);
                            }
                        }
                        const bool begins = GROUP == 32 || u == 0, ends = GROUP == 32 || u == 3;
                        const uint4 words = w[d][u];
                        if (more) w[d][u] = load_weight(w_at + from * QUAD + u * (QUAD / 4), policy);
                        multiply_chunk(words, b, begins, partial);
                        if (ends) {
                            uint2 v = s[d];
                            if (GROUP == 32) v = uint2{shuffle(v.x, (lane & 28) + u), shuffle(v.y, (lane & 28) + u)};
                            add_scaled(v, partial, sums);
                        }
                    }
                    if (more) s[d] = load_scales(s_at + from * SCALES);
                }
            }
        }

        // Sums of the parts: [warp][row of x][weight row]; two places in turn, so that one barrier a block is enough.
        float* sums_at = shared + all.sums_at + (turn % 2) * warps * columns * SUM_STRIDE;
        put_part(sums_at + warp * columns * SUM_STRIDE, columns, lane, sums);
        __syncthreads();
        finish_block<EPILOGUE>(p, sums_at, warps, blockDim.x, m0, columns, block, first_extra);
        if (!next) break;
        block += step;
        w_at += to_next * QUAD;
        s_at += to_next * SCALES;
    }
}

}  // namespace slipstream
