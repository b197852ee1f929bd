// What stands before and after a matrix product: its parameters, the norm in front, and what becomes of an output.
#pragma once
#include <primitives.cuh>

namespace slipstream {

enum Epilogue { STORE = 0, ADD = 1, GATE_UP = 2, QKV = 3 };

// kernels/cuda/launch.py has the same struct. Strides are in elements.
struct Params {
    const bf16* x;                // [M, K], row stride x_stride
    const bf16* weight;           // packed (pack.py): [tiles of 16 rows, K / 32, 2 MMAs, 32 lanes, 8]
    const bf16* norm_weight;      // [K]
    const float* sumsq_in;        // [M, num_sumsq]; null: the row is read instead
    const bf16* residual;         // ADD: [M, N], row stride residual_stride
    const bf16* cos;              // QKV: [M, head_dim], row stride angle_stride
    const bf16* sin;
    const int64_t* write_index;   // QKV: [M] cells; null: cell m
    bf16* out;                    // STORE, ADD, GATE_UP: [M, N]; QKV: [M, q_heads, head_dim]
    bf16* out_k;                  // QKV: cell c at c * kv_stride: [kv_heads, head_dim]
    bf16* out_v;
    float* sumsq_out;             // ADD: [M, ceil(N / 16)]
    int32_t* counter;             // of the weight (bulk_gemm.cuh)
    int64_t x_stride, residual_stride, angle_stride, kv_stride;
    int32_t M, N, K;
    int32_t tiles;                // of 16 weight rows
    int32_t chunks_per_part;      // of the longest part
    int32_t slots;                // of the ring (bulk_gemm.cuh)
    int32_t num_sumsq;
    int32_t m_groups;             // groups of rows of x, each with CTAs of its own
    int32_t q_heads, kv_heads, head_dim;
    int32_t evict_first;
    int32_t left;                 // slots, of bulk_gemm.cuh: when the next kernel may start
    int32_t fixed;                // units that each CTA has from the start
    float eps, inverse_width;     // 1 / K
};

constexpr int CHUNK = 512;  // elements of a packed tile's chunk: 16 weight rows, 32 k

__device__ inline float bf16_to_float(bf16 v) { return bits_to_float(uint32_t(v) << 16); }
__device__ inline bf16 float_to_bf16(float v) { return bf16(pack_bf16(v, 0.0f) & 0xffffu); }
__device__ inline float round_bf16(float v) { return bits_to_float(pack_bf16(v, 0.0f) << 16); }
__device__ inline float low_float(uint32_t packed) { return bits_to_float(packed << 16); }
__device__ inline float high_float(uint32_t packed) { return bits_to_float(packed & 0xffff0000u); }

// x * rstd rounded, times the norm's weight rounded: two elements.
__device__ inline uint32_t normed_pair(uint32_t x, float rstd, uint32_t weight) {
    return multiply_bf16(pack_bf16(multiply(low_float(x), rstd), multiply(high_float(x), rstd)), weight);
}

__device__ inline uint4 normed(uint4 x, float rstd, uint4 weight) {
    return uint4{normed_pair(x.x, rstd, weight.x), normed_pair(x.y, rstd, weight.y), normed_pair(x.z, rstd, weight.z),
                 normed_pair(x.w, rstd, weight.w)};
}

__device__ inline float square_sum(uint32_t packed, float sum) {
    const float low = low_float(packed), high = high_float(packed);
    return multiply_add(high, high, multiply_add(low, low, sum));
}

// 1 / sqrt(mean square + eps) of row m by four lanes, t = 0..3 in each: no barrier, BATCH loads in flight. The order of
// the sum depends on the number of parts alone. All lanes of a warp come here, each group of four with its row.
template <int BATCH>
__device__ inline float row_rstd(const Params& p, int m, int t) {
    float sum = 0.0f;
    if (m < p.M) {
        if (p.sumsq_in != nullptr) {
            const float* parts = p.sumsq_in + int64_t(m) * p.num_sumsq;
            if (p.num_sumsq % 4 == 0) {
                for (int first = t; first < p.num_sumsq / 4; first += 4 * BATCH) {
                    float4 v[BATCH];
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) {
                        v[b] = float4{0.0f, 0.0f, 0.0f, 0.0f};
                        if (first + 4 * b < p.num_sumsq / 4) v[b] = load_sums(parts + 4 * (first + 4 * b));
                    }
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) sum += (v[b].x + v[b].y) + (v[b].z + v[b].w);
                }
            } else {
                for (int i = t; i < p.num_sumsq; i += 4) sum += parts[i];
            }
        } else {
            const bf16* row = p.x + m * p.x_stride;
#pragma unroll 4
            for (int i = t; i < p.K / 8; i += 4) {
                const uint4 v = load_activation(row + 8 * i);
                sum = square_sum(v.w, square_sum(v.z, square_sum(v.y, square_sum(v.x, sum))));
            }
        }
    }
    sum += shuffle_xor(0xffffffffu, sum, 1);
    sum += shuffle_xor(0xffffffffu, sum, 2);
    return reciprocal_sqrt(multiply_add(sum, p.inverse_width, p.eps));
}

// row_rstd for a whole CTA from sums that are there, in two steps with a barrier between: `threads` threads put sums of
// four at `pieces` [M, num_sumsq / 4], in shared memory, then lanes sum these in row_rstd's order. So all loads of all rows
// are in flight at once.
__device__ inline void put_pieces(const Params& p, float* pieces, int threads) {
#pragma unroll 2
    for (int i = threadIdx.x; i < p.M * (p.num_sumsq / 4); i += threads) {
        const float4 v = load_sums(p.sumsq_in + 4 * i);
        pieces[i] = (v.x + v.y) + (v.z + v.w);
    }
}
__device__ inline float rstd_of_pieces(const Params& p, const float* pieces, int m, int t) {
    const int count = p.num_sumsq / 4;
    float sum = 0.0f;
    if (m < p.M) {
#pragma unroll 8
        for (int i = t; i < count; i += 4) sum += pieces[m * count + i];
    }
    sum += shuffle_xor(0xffffffffu, sum, 1);
    sum += shuffle_xor(0xffffffffu, sum, 2);
    return reciprocal_sqrt(multiply_add(sum, p.inverse_width, p.eps));
}

// Tiles of gate and up rows and of heads hold pairs of outputs: rows i and i + 8 of a tile.
template <int EPILOGUE>
constexpr bool PAIRED = EPILOGUE == GATE_UP || EPILOGUE == QKV;
template <int EPILOGUE>
constexpr int TILE_OUTPUTS = PAIRED<EPILOGUE> ? 8 : 16;

// Which output (or pair of outputs) `row` of the tiles from `tile` on is: of QKV a head and an element of its first
// half, else the index in the output row. The order of rows in a packed weight is pack.py's.
struct Place {
    int head, at;
    bool valid;
};

template <int EPILOGUE>
__device__ inline Place place_of(const Params& p, int tile, int row) {
    if (EPILOGUE != QKV) {
        const int at = TILE_OUTPUTS<EPILOGUE> * tile + row;
        return Place{0, at, at < p.N};
    }
    tile += row / 8;
    const int tiles_per_head = p.head_dim / 16, head = tile / tiles_per_head;
    return Place{head, (tile - head * tiles_per_head) * 8 + row % 8, tile < p.tiles};
}

// What the epilogue of one output reads. Read before the product for a thread's first one: its latency is not added
// at the end then.
struct Extra {
    uint32_t a, b;  // ADD: residual; QKV: cos and sin of both halves
    int32_t cell;
};

template <int EPILOGUE>
__device__ inline Extra load_extra(const Params& p, int m, const Place& place) {
    Extra extra{0, 0, m};
    if (!place.valid) return extra;
    if (EPILOGUE == ADD) extra.a = p.residual[m * p.residual_stride + place.at];
    if (EPILOGUE == QKV) {
        if (place.head < p.q_heads + p.kv_heads) {
            const int64_t at = m * p.angle_stride + place.at;
            const int half = p.head_dim / 2;
            extra.a = p.cos[at] | uint32_t(p.cos[at + half]) << 16;
            extra.b = p.sin[at] | uint32_t(p.sin[at + half]) << 16;
        }
        if (p.write_index != nullptr) extra.cell = int32_t(p.write_index[m]);
    }
    return extra;
}

// silu(gate) * up of two sums.
__device__ inline bf16 gated(float first, float second) {
    const float gate = round_bf16(first), up = round_bf16(second);
    const float activated = round_bf16(gate / (1.0f + exponential(-gate)));
    return float_to_bf16(multiply(activated, up));
}

// Writes one output (pairs: `first` and `second` are gate and up, or element i and i + dim / 2 of a head). Sixteen
// lanes come together with the rows of one tile.
template <int EPILOGUE>
__device__ inline void finish(const Params& p, int m, const Place& place, float first, float second,
                              const Extra& extra) {
    if (EPILOGUE == STORE) {
        if (place.valid) p.out[int64_t(m) * p.N + place.at] = float_to_bf16(first);
    } else if (EPILOGUE == ADD) {
        const float sum = round_bf16(round_bf16(first) + bf16_to_float(bf16(extra.a)));
        float squared = 0.0f;
        if (place.valid) {
            p.out[int64_t(m) * p.N + place.at] = float_to_bf16(sum);
            squared = multiply(sum, sum);
        }
        const uint32_t group = 0xffffu << (threadIdx.x & 16);
#pragma unroll
        for (int mask = 8; mask > 0; mask >>= 1) squared += shuffle_xor(group, squared, mask);
        if (place.at % 16 == 0 && place.valid) {
            p.sumsq_out[int64_t(m) * ((p.N + 15) / 16) + place.at / 16] = squared;
        }
    } else if (EPILOGUE == GATE_UP) {
        if (place.valid) {
            p.out[int64_t(m) * p.N + place.at] = gated(first, second);
        }
    } else if (place.valid) {
        const int half = p.head_dim / 2, head = place.head;
        float a = round_bf16(first), b = round_bf16(second);
        bf16* to = p.out + (int64_t(m) * p.q_heads + head) * p.head_dim;
        if (head < p.q_heads + p.kv_heads) {
            const float from_a = round_bf16(multiply(a, low_float(extra.a)));
            const float from_b = round_bf16(multiply(-b, low_float(extra.b)));
            const float to_b = round_bf16(multiply(b, high_float(extra.a)));
            const float to_a = round_bf16(multiply(a, high_float(extra.b)));
            a = from_a + from_b;
            b = to_b + to_a;
            if (head >= p.q_heads) to = p.out_k + int64_t(extra.cell) * p.kv_stride + (head - p.q_heads) * p.head_dim;
        } else {
            to = p.out_v + int64_t(extra.cell) * p.kv_stride + (head - p.q_heads - p.kv_heads) * p.head_dim;
        }
        to[place.at] = float_to_bf16(a);
        to[place.at + half] = float_to_bf16(b);
    }
}

// Puts a warp's MMA sums where finish_tiles finds them: sums[warp][row of x][weight row].
template <int NT, int TM>
__device__ inline void put_sums(float* shared, int warp, int lane, const float (&sums)[TM][NT][4]) {
    constexpr int STRIDE = 16 * TM + 4;  // + 4: no bank conflicts
    float* mine = shared + warp * 8 * NT * STRIDE;
    const int g = lane / 4, t = lane % 4;
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
}

// The extra of the first output that this thread will finish.
template <int EPILOGUE, int NT, int TM>
__device__ inline Extra load_first_extra(const Params& p, int m0, int tile) {
    constexpr int ROWS = TM * TILE_OUTPUTS<EPILOGUE>;
    Extra extra{0, 0, 0};
    if (EPILOGUE == ADD || EPILOGUE == QKV) {
        const int m = m0 + int(threadIdx.x) / ROWS;
        if (m < p.M && int(threadIdx.x) < 8 * NT * ROWS) {
            extra = load_extra<EPILOGUE>(p, m, place_of<EPILOGUE>(p, tile, threadIdx.x % ROWS));
        }
    }
    return extra;
}

// The sum of the parts of one output: 2 i and 2 i + 1, then these pairs in order.
template <int MAX_WARPS, int STRIDE>
__device__ inline float sum_parts(const float* at, int warps) {
    float part[MAX_WARPS];
#pragma unroll
    for (int v = 0; v < MAX_WARPS; ++v) part[v] = v < warps ? at[v * STRIDE] : 0.0f;  // all reads in flight
    float sum = part[0];
#pragma unroll
    for (int v = 0; v < MAX_WARPS; v += 2) {
        const float pair = v + 1 < MAX_WARPS && v + 1 < warps ? part[v] + part[v + 1] : part[v];
        sum = v == 0 ? pair : v < warps ? sum + pair : sum;
    }
    return sum;
}

// Finishes the outputs of TM tiles, by `threads` threads.
template <int EPILOGUE, int NT, int TM, int MAX_WARPS>
__device__ inline void finish_tiles(const Params& p, const float* shared, int warps, int threads, int m0, int tile,
                                    const Extra& first_extra) {
    constexpr int COLUMNS = 8 * NT, STRIDE = 16 * TM + 4, OUTPUTS = TILE_OUTPUTS<EPILOGUE>, ROWS = TM * OUTPUTS;
    const int outputs = min(COLUMNS, p.M - m0) * ROWS;  // a multiple of 16, or pairs
    for (int index = threadIdx.x; index < outputs; index += threads) {
        const int column = index / ROWS, row = index % ROWS, m = m0 + column;
        const float* at = shared + column * STRIDE + 16 * (row / OUTPUTS) + row % OUTPUTS;
        const float first = sum_parts<MAX_WARPS, COLUMNS * STRIDE>(at, warps);
        const float second = PAIRED<EPILOGUE> ? sum_parts<MAX_WARPS, COLUMNS * STRIDE>(at + 8, warps) : 0.0f;
        const Place place = place_of<EPILOGUE>(p, tile, row);
        Extra extra = first_extra;
        if ((EPILOGUE == ADD || EPILOGUE == QKV) && index >= threads) extra = load_extra<EPILOGUE>(p, m, place);
        finish<EPILOGUE>(p, m, place, first, second, extra);
    }
}

}  // namespace slipstream
