// y = x W^T over INT4 weights (kernels/int4.py has their order), bound by the reading of W.
//
// A block is 32 weight rows: two A operands of mma.m16n8k16. Of each chunk of 32 k a lane (g = lane / 4, t = lane % 4)
// loads 16 bytes: four words, word q with the k pair 8 t + 2 q of rows g, g + 8, g + 16, g + 24. So words 0, 1 are the
// registers of one MMA of either tile, words 2, 3 those of a second, and a row of x is read 16 bytes a lane. A nibble
// pair becomes bf16 by two instructions, exactly; integers are what the matrix unit multiplies. Each group's sum begins
// at zero and is multiplied by the group's scale in fp32. No weight is rounded.
//
// K, a multiple of 128, is cut into equal parts of quads (4 chunks; the last part may be shorter) by the shape alone, a
// warp for each; the sums of the parts are added in their order. An MMA's column depends on no other column: a row's bits
// depend neither on how many rows travel with it nor on the kernel that their number chose.
//
// Weights do not depend on the kernel before: their first loads are issued before griddepcontrol.wait.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// kernels/cuda/int4_launch.py has the same struct.
struct Int4Params {
    Params common;         // weight: [blocks, K / 32, 32 lanes, 4 words]; chunks_per_part: a multiple of 4
    const bf16* scales;    // [blocks, K / group, 8, 4]: of rows g, g + 8, g + 16, g + 24 side by side
    int32_t staged_stride; // STAGED: elements between rows of x in shared memory
    int32_t sums_at;       // floats in front of the sums in shared memory
};

constexpr int QUAD = 1024;  // a block's quad in units of 2 bytes

constexpr int BATCH = 4;  // rows of x whose loads are in flight together

// 1 / sqrt(mean square + eps) of rows m, m + 1, .., of the first BATCH of `rows` rows, by a whole warp. The order of each sum depends
// on the number of parts, or on K, alone.
__device__ inline void warp_rstd(const Params& p, int m, int rows, int lane, float (&rstd)[BATCH]) {
#pragma unroll
    for (int a = 0; a < BATCH; ++a) rstd[a] = 0.0f;
    if (p.sumsq_in != nullptr && p.num_sumsq % 4 == 0) {
#pragma unroll 2
        for (int i = lane; i < p.num_sumsq / 4; i += 32) {
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                if (a < rows) {
                    const float4 v = load_sums(p.sumsq_in + int64_t(m + a) * p.num_sumsq + 4 * i);
                    rstd[a] += (v.x + v.y) + (v.z + v.w);
                }
            }
        }
    } else if (p.sumsq_in != nullptr) {
#pragma unroll
        for (int a = 0; a < BATCH; ++a) {
            if (a < rows) {
                for (int i = lane; i < p.num_sumsq; i += 32) rstd[a] += p.sumsq_in[int64_t(m + a) * p.num_sumsq + i];
            }
        }
    } else {
#pragma unroll 2
        for (int i = lane; i < p.K / 8; i += 32) {
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                if (a < rows) {
                    const uint4 v = load_activation(p.x + (m + a) * p.x_stride + 8 * i);
                    rstd[a] = square_sum(v.w, square_sum(v.z, square_sum(v.y, square_sum(v.x, rstd[a]))));
                }
            }
        }
    }
#pragma unroll
    for (int a = 0; a < BATCH; ++a) {
        if (a < rows) {
#pragma unroll
            for (int mask = 16; mask > 0; mask >>= 1) rstd[a] += shuffle_xor(0xffffffffu, rstd[a], mask);
            rstd[a] = reciprocal_sqrt(multiply_add(rstd[a], p.inverse_width, p.eps));
        }
    }
}

// A part of `rows` rows of x, read through the norm, into shared memory, at the same place in each row; by one warp.
// pieces: of 8 elements, of a row.
template <bool NORM>
__device__ inline void stage(const Params& p, int m0, int rows, int k_begin, int pieces, int lane, bf16* to,
                             int stride) {
    for (int first_row = 0; first_row < rows; first_row += BATCH) {
        // 1, 2 or 4 rows at a time: what one turn leaves to do of BATCH loads is more of the same row.
        const int left = rows - first_row, shift = left == 1 ? 0 : left == 2 ? 1 : 2;
        const int turns = (pieces + 31) / 32 << shift;
        float rstd[BATCH];
        for (int first = 0; first < turns; first += BATCH) {
            uint4 v[BATCH], scale[BATCH];
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                const int turn = first + a, i = (turn >> shift) * 32 + lane, at = turn & ((1 << shift) - 1);
                if (at < left && i < pieces) {
                    v[a] = load_activation(p.x + (m0 + first_row + at) * p.x_stride + k_begin + 8 * i);
                    if (NORM) scale[a] = load_activation(p.norm_weight + k_begin + 8 * i);
                }
            }
            if (NORM && first == 0) warp_rstd(p, m0 + first_row, left, lane, rstd);
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                const int turn = first + a, i = (turn >> shift) * 32 + lane, at = turn & ((1 << shift) - 1);
                if (at < left && i < pieces) {
                    if (NORM) {
                        const float by = at == 0 ? rstd[0] : at == 1 ? rstd[1] : at == 2 ? rstd[2] : rstd[3];
                        v[a] = normed(v[a], by, scale[a]);
                    }
                    store_shared(to + (first_row + at) * stride + k_begin + 8 * i, v[a]);
                }
            }
        }
    }
    sync_warp();
}

template <int EPILOGUE, bool NORM, int GROUP, int NT, int DEPTH, bool STAGED>
__device__ inline void int4_gemm(const Int4Params& all, float* shared) {
    static_assert(GROUP == 32 || GROUP == 128, "a group is a chunk or a quad");
    constexpr bool PAIRS = PAIRED<EPILOGUE>;
    constexpr int COLUMNS = 8 * NT;            // rows of x in this CTA
    constexpr int STRIDE = 36;                 // of the sums in shared memory: 32 and 4: no bank conflicts
    constexpr int TILES = 2;                   // of 16 weight rows
    constexpr int ROWS = TILES * TILE_OUTPUTS<EPILOGUE>;  // outputs of a row of x
    const Params& p = all.common;

    // Attention, behind q, k and v, reads older keys before it waits: it starts when all before this kernel is done.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    int block = p.m_groups == 1 ? blockIdx.x : blockIdx.x / p.m_groups;
    const int m0 = (blockIdx.x - block * p.m_groups) * COLUMNS;
    // STAGED: fewer CTAs take several blocks in turn: their rows of x are staged already, and the loads of the next
    // block are in flight while one ends. Every warp's count of quads is a multiple of DEPTH where that happens.
    const int step = STAGED ? int(gridDim.x) : 0, blocks = p.tiles / TILES;
    const int quads = p.K / 128, first_quad = warp * (p.chunks_per_part / 4);
    const int count = min(p.chunks_per_part / 4, quads - first_quad);

    const int64_t at = int64_t(block) * quads + first_quad;
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
            for (int u = 0; u < 4; ++u) w[d][u] = load_weight(w_at + d * QUAD + u * (QUAD / 4), policy);
            s[d] = load_scales(s_at + d * SCALES);
        }
    }

    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();

    bf16* staged = reinterpret_cast<bf16*>(shared);
    const int k0 = first_quad * 128 + 8 * t;
    const bf16* x_at = p.x + int64_t(m0 + g) * p.x_stride + k0;
    float rstd[NT];
    uint4 x[NT], scale;  // of one chunk; scale: the norm's weight
    if (STAGED) {
        stage<NORM>(p, m0, min(COLUMNS, p.M - m0), first_quad * 128, 16 * count, lane, staged, all.staged_stride);
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
        Extra first_extra{0, 0, 0};
        if (EPILOGUE == ADD || EPILOGUE == QKV) {
            const int m = m0 + int(threadIdx.x) / ROWS;
            if (m < p.M && int(threadIdx.x) < COLUMNS * ROWS) {
                first_extra = load_extra<EPILOGUE>(p, m, place_of<EPILOGUE>(p, block * TILES, threadIdx.x % ROWS));
            }
        }
        float sums[2][NT][4], partial[2][NT][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
            }
        }

        for (int round = 0; round < count; round += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int quad = round + d;
                if (quad < count) {
                    // What takes this quad's place: a later one of the block, or one of the next block.
                    const int ahead = quad + DEPTH;
                    const bool more = ahead < count || next;
                    const int64_t from = ahead < count ? ahead : to_next + ahead - count;
#pragma unroll
                    for (int u = 0; u < 4; ++u) {
                        const int k = 128 * quad + 32 * u;
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
                            if (NORM) scale = load_activation(p.norm_weight + k0 + k + 32);
#pragma unroll
                            for (int j = 0; j < NT; ++j) {
                                if (m0 + 8 * j + g < p.M) x[j] = load_activation(x_at + 8 * j * p.x_stride + k + 32);
                            }
                        }
                        const bool begins = GROUP == 32 || u == 0, ends = GROUP == 32 || u == 3;
                        const uint32_t words[4] = {w[d][u].x, w[d][u].y, w[d][u].z, w[d][u].w};
                        if (more) w[d][u] = load_weight(w_at + from * QUAD + u * (QUAD / 4), policy);
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const uint32_t a0 = integers(words[2 * half], 2 * i);
                                const uint32_t a1 = integers(words[2 * half], 2 * i + 1);
                                const uint32_t a2 = integers(words[2 * half + 1], 2 * i);
                                const uint32_t a3 = integers(words[2 * half + 1], 2 * i + 1);
#pragma unroll
                                for (int j = 0; j < NT; ++j) {
                                    const uint32_t b0 = half ? b[j].z : b[j].x, b1 = half ? b[j].w : b[j].y;
                                    if (begins && half == 0) {
                                        mma_16x8x16_from_zero(partial[i][j], a0, a1, a2, a3, b0, b1);
                                    } else {
                                        mma_16x8x16(partial[i][j], a0, a1, a2, a3, b0, b1);
                                    }
                                }
                            }
                        }
                        if (ends) {
                            uint2 v = s[d];  // scales of rows g and g + 8, of g + 16 and g + 24
                            if (GROUP == 32) v = uint2{shuffle(v.x, (lane & 28) + u), shuffle(v.y, (lane & 28) + u)};
                            const float by[4] = {low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y)};
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
#pragma unroll
                                for (int j = 0; j < NT; ++j) {
#pragma unroll
                                    for (int e = 0; e < 4; ++e) {
                                        sums[i][j][e] = multiply_add(partial[i][j][e], by[2 * i + e / 2], sums[i][j][e]);
                                    }
                                }
                            }
                        }
                    }
                    if (more) s[d] = load_scales(s_at + from * SCALES);
                }
            }
        }

        // Sums of the parts: [warp][row of x][weight row].
        // Two places in turn, so that one barrier a block is enough.
        float* sums_at = shared + all.sums_at + (turn % 2) * warps * COLUMNS * STRIDE;
        float* mine = sums_at + warp * COLUMNS * STRIDE;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
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
            const float* at = sums_at + column * STRIDE + row;
            float first = at[0], second = 0.0f;
#pragma unroll 4
            for (int v = 1; v < warps; ++v) first += at[v * COLUMNS * STRIDE];
            if (PAIRS) {
                second = at[16];
#pragma unroll 4
                for (int v = 1; v < warps; ++v) second += at[16 + v * COLUMNS * STRIDE];
            }
            const Place place = place_of<EPILOGUE>(p, block * TILES, row);
            Extra extra = first_extra;
            if ((EPILOGUE == ADD || EPILOGUE == QKV) && index >= int(blockDim.x)) {
                extra = load_extra<EPILOGUE>(p, m, place);
            }
            finish<EPILOGUE>(p, m, place, first, second, extra);
        }
        if (!next) break;
        block += step;
        w_at += to_next * QUAD;
        s_at += to_next * SCALES;
    }
}

}  // namespace slipstream
