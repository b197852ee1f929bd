// What the two kernels over INT4 weights share: the norm, rows of x in shared memory, a chunk's products, a block's end.
//
// The sum: K, a multiple of 128, is quads (4 chunks of 32); quad i belongs to part i mod P, P by the weight's shape alone,
// a warp for each part. In a part each group's sum begins at zero and is multiplied by the group's scale in fp32; the
// sums of the parts are added in their order. Integers are what the matrix unit multiplies: no weight is rounded. An
// MMA's column depends on no other column: a row's bits depend neither on how many rows travel with it nor on the kernel
// that their number chose.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// kernels/cuda/int4_launch.py has the same struct.
struct Int4Params {
    Params common;          // weight: [blocks, K / 32, 32 lanes, 4 words]
    const bf16* scales;     // [blocks, K / group, 8, 4]: of rows g, g + 8, g + 16, g + 24 side by side
    int32_t staged_stride;  // elements between rows of x in shared memory
    int32_t x_at, sums_at;  // floats in front of the norm's weight (int4_bulk.cuh) and of the sums in shared memory
    int32_t slots_of_block; // int4_bulk.cuh: of the ring, that a block's quads are
    uint32_t inverse_slots; // ceil(2^31 / slots_of_block)
};

constexpr int QUAD = 1024;     // a block's quad in units of 2 bytes
constexpr int MAX_PARTS = 16;
constexpr int SUM_STRIDE = 36; // of the sums in shared memory: 32 rows and 4: no bank conflicts
constexpr int BLOCK_TILES = 2; // of 16 weight rows

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

// Where in K the piece (8 elements) i of a part begins.
__device__ inline int piece_at(int i, int part, int parts) { return ((i >> 4) * parts + part) * 128 + 8 * (i & 15); }

// A part of `rows` rows of x, read through the norm, into shared memory, at the same place in each row; by one warp.
// pieces: of the part, of a row.
template <bool NORM>
__device__ inline void stage(const Params& p, int m0, int rows, int part, int parts, int pieces, int lane, bf16* to,
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
                    const int k = piece_at(i, part, parts);
                    v[a] = load_activation(p.x + (m0 + first_row + at) * p.x_stride + k);
                    if (NORM) scale[a] = load_activation(p.norm_weight + k);
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
                    store_shared(to + (first_row + at) * stride + piece_at(i, part, parts), v[a]);
                }
            }
        }
    }
    sync_warp();
}

// A chunk of a block: 8 nibble pairs a lane of either tile become bf16 by two instructions each, exactly.
template <int NT>
__device__ inline void multiply_chunk(const uint4& w, const uint4 (&b)[NT], bool begins, float (&partial)[2][NT][4]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
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
}

// A group's end. v: scales of rows g and g + 8, of g + 16 and g + 24.
template <int NT>
__device__ inline void add_scaled(uint2 v, const float (&partial)[2][NT][4], float (&sums)[2][NT][4]) {
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

template <int NT>
__device__ inline void clear(float (&sums)[2][NT][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
        }
    }
}

// A part's sums of `columns` rows of x, [row of x][weight row] from `mine` on.
template <int NT>
__device__ inline void put_part(float* mine, int columns, int lane, const float (&sums)[2][NT][4]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 8 * j + 2 * t + e % 2;
                if (column < columns) mine[column * SUM_STRIDE + 16 * i + g + 8 * (e / 2)] = sums[i][j][e];
            }
        }
    }
}

template <int EPILOGUE>
constexpr int BLOCK_OUTPUTS = BLOCK_TILES * TILE_OUTPUTS<EPILOGUE>;  // of a row of x

// What the first output that this thread will finish reads.
template <int EPILOGUE>
__device__ inline Extra first_extra_of(const Params& p, int m0, int columns, int block) {
    constexpr int ROWS = BLOCK_OUTPUTS<EPILOGUE>;
    const int column = int(threadIdx.x) / ROWS;
    if ((EPILOGUE != ADD && EPILOGUE != QKV) || column >= columns) return Extra{0, 0, 0};
    return load_extra<EPILOGUE>(p, m0 + column, place_of<EPILOGUE>(p, block * BLOCK_TILES, threadIdx.x % ROWS));
}

// The parts' sums in their order.
__device__ inline float sum_in_order(const float* at, int stride, int parts) {
    float sum = at[0];
#pragma unroll 4
    for (int v = 1; v < parts; ++v) sum += at[v * stride];
    return sum;
}

// The outputs of a block for `columns` rows of x, by `threads` threads.
template <int EPILOGUE>
__device__ inline void finish_block(const Params& p, const float* sums_at, int parts, int threads, int m0, int columns,
                                    int block, const Extra& first_extra) {
    constexpr int ROWS = BLOCK_OUTPUTS<EPILOGUE>;
    const int stride = columns * SUM_STRIDE;
    const int outputs = columns * ROWS;  // a multiple of 16
    for (int index = threadIdx.x; index < outputs; index += threads) {
        const int column = index / ROWS, row = index % ROWS, m = m0 + column;
        const float* at = sums_at + column * SUM_STRIDE + row;
        const float first = sum_in_order(at, stride, parts);
        const float second = PAIRED<EPILOGUE> ? sum_in_order(at + 16, stride, parts) : 0.0f;
        const Place place = place_of<EPILOGUE>(p, block * BLOCK_TILES, row);
        Extra extra = first_extra;
        if ((EPILOGUE == ADD || EPILOGUE == QKV) && index >= threads) extra = load_extra<EPILOGUE>(p, m, place);
        finish<EPILOGUE>(p, m, place, first, second, extra);
    }
}

}  // namespace slipstream
