// y = x W^T for few rows of x (1 to 128), bound by the reading of W, with what stands before and after it in a layer.
//
// Weights are the A operand of mma.m16n8k16 (16 weight rows), rows of x its B operand (8 rows: "n8 tile"). A thread holds
// 8 consecutive k of weight rows g and g + 8 (g = lane / 4, t = lane % 4, k = 32 chunk + 8 t ..) by 16-byte loads straight
// into registers: its words 0, 1 are the two k pairs of one MMA, words 2, 3 those of a second. That is a permutation of k
// within the chunk; x is read by the same one, so the sum is over the same products. No shared memory on the way, and
// DEPTH chunks of weights are in flight per thread.
//
// The warps of a CTA split K: warp w takes chunks [w n, (w + 1) n), in order, and the sums of the warps are added in warp
// order. Neither depends on M, and an MMA's column depends on no other column: a row's bits do not depend on how many
// rows travel with it, nor on the variant (NT, TM, DEPTH, X_DEPTH) that its number chose.
//
// Weights do not depend on the kernel before: their first loads are issued before griddepcontrol.wait.
#include <primitives.cuh>

namespace slipstream {

enum Epilogue { STORE = 0, ADD = 1, GATE_UP = 2, QKV = 3 };

// kernels/cuda/launch.py has the same struct. Strides are in elements.
struct Params {
    const bf16* x;                // [M, K], row stride x_stride
    const bf16* weight;           // [N (GATE_UP: 2 N), K]
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
    int64_t x_stride, residual_stride, angle_stride, kv_stride;
    int32_t M, N, K;
    int32_t chunks_per_warp;
    int32_t num_sumsq;
    int32_t m_groups;             // groups of 8 NT rows
    int32_t q_heads, kv_heads, head_dim;
    int32_t evict_first;
    float eps;
};

__device__ inline float bf16_to_float(bf16 v) { return bits_to_float(uint32_t(v) << 16); }
__device__ inline bf16 float_to_bf16(float v) { return bf16(pack_bf16(v, 0.0f) & 0xffffu); }
__device__ inline float round_bf16(float v) { return bits_to_float(pack_bf16(v, 0.0f) << 16); }
__device__ inline float low_float(uint32_t packed) { return bits_to_float(packed << 16); }
__device__ inline float high_float(uint32_t packed) { return bits_to_float(packed & 0xffff0000u); }

// x * rstd rounded, times the norm's weight rounded: two elements.
__device__ inline uint32_t normed_pair(uint32_t x, float rstd, uint32_t weight) {
    const uint32_t unit = pack_bf16(multiply(low_float(x), rstd), multiply(high_float(x), rstd));
    return pack_bf16(multiply(low_float(unit), low_float(weight)), multiply(high_float(unit), high_float(weight)));
}

__device__ inline uint4 normed(uint4 x, float rstd, uint4 weight) {
    return uint4{normed_pair(x.x, rstd, weight.x), normed_pair(x.y, rstd, weight.y), normed_pair(x.z, rstd, weight.z),
                 normed_pair(x.w, rstd, weight.w)};
}

__device__ inline float square_sum(uint32_t packed, float sum) {
    const float low = low_float(packed), high = high_float(packed);
    return multiply_add(high, high, multiply_add(low, low, sum));
}

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) v += shuffle_xor(0xffffffffu, v, mask);
    return v;
}

// 1 / sqrt(mean square + eps) of row m, by one warp.
__device__ inline float row_rstd(const Params& p, int m, int lane) {
    float sum = 0.0f;
    if (p.sumsq_in != nullptr) {
        const float* parts = p.sumsq_in + int64_t(m) * p.num_sumsq;
#pragma unroll 8
        for (int i = lane; i < p.num_sumsq; i += 32) sum += parts[i];
    } else {
        const bf16* row = p.x + m * p.x_stride;
#pragma unroll 4
        for (int i = lane; i < p.K / 8; i += 32) {
            const uint4 v = load_activation(row + 8 * i);
            sum = square_sum(v.w, square_sum(v.z, square_sum(v.y, square_sum(v.x, sum))));
        }
    }
    return reciprocal_sqrt(warp_sum(sum) / float(p.K) + p.eps);
}

// What the epilogue of one output (or pair) reads. Read before the main loop for a thread's first output, so that
// its latency is not added at the end.
struct Extra {
    uint32_t a, b;  // ADD: residual; QKV: cos and sin of both halves
    int64_t cell;
};

template <int EPILOGUE>
__device__ inline Extra load_extra(const Params& p, int m, int first_row, int element, bool rotated) {
    Extra extra{0, 0, m};
    if (EPILOGUE == ADD) extra.a = p.residual[m * p.residual_stride + first_row];
    if (EPILOGUE == QKV) {
        if (rotated) {
            const int64_t at = m * p.angle_stride + element;
            const int half = p.head_dim / 2;
            extra.a = p.cos[at] | uint32_t(p.cos[at + half]) << 16;
            extra.b = p.sin[at] | uint32_t(p.sin[at + half]) << 16;
        }
        if (p.write_index != nullptr) extra.cell = p.write_index[m];
    }
    return extra;
}

template <int EPILOGUE, bool NORM, int NT, int TM, int DEPTH, int X_DEPTH>
__device__ inline void skinny_gemm(const Params& p, float* shared) {
    constexpr bool PAIRS = EPILOGUE == GATE_UP || EPILOGUE == QKV;
    static_assert(DEPTH % X_DEPTH == 0, "a slot of x must not depend on the round");
    static_assert(!PAIRS || TM == 2, "gate and up, or both halves of a head: one 16-row tile each");
    constexpr int COLUMNS = 8 * NT;       // rows of x in this CTA
    constexpr int STRIDE = 16 * TM + 4;   // of the sums in shared memory; + 4: no bank conflicts

    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int tile = blockIdx.x / p.m_groups;
    const int m0 = (blockIdx.x % p.m_groups) * COLUMNS;

    // Weight rows of this CTA: TM tiles of 16 from row_base[i]; `last_row` clamps the ragged end.
    int head = 0, element0 = 0;
    int row_base[TM];
    int rows_here = 16 * TM;  // valid rows of y, or of one half for pairs
    int last_row[TM];
    if (EPILOGUE == QKV) {
        const int tiles_per_head = p.head_dim / 32;
        head = tile / tiles_per_head;
        element0 = (tile % tiles_per_head) * 16;
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            row_base[i] = head * p.head_dim + element0 + i * (p.head_dim / 2);
            last_row[i] = row_base[i] + 15;
        }
        rows_here = 16;
    } else if (EPILOGUE == GATE_UP) {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            row_base[i] = tile * 16 + i * p.N;
            last_row[i] = p.N - 1 + i * p.N;
        }
        rows_here = min(16, p.N - tile * 16);
    } else {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            row_base[i] = tile * 16 * TM + 16 * i;
            last_row[i] = p.N - 1;
        }
        rows_here = min(16 * TM, p.N - row_base[0]);
    }

    // This warp's part of K.
    const int first_chunk = warp * p.chunks_per_warp;
    const int count = min(p.chunks_per_warp, p.K / 32 - first_chunk);
    const int k0 = first_chunk * 32 + 8 * t;

    const bf16* w_at[TM][2];
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        w_at[i][0] = p.weight + int64_t(min(row_base[i] + g, last_row[i])) * p.K + k0;
        w_at[i][1] = p.weight + int64_t(min(row_base[i] + g + 8, last_row[i])) * p.K + k0;
    }
    const uint64_t policy = weight_policy(p.evict_first != 0);

    uint4 w[DEPTH][TM][2];
#pragma unroll
    for (int u = 0; u < DEPTH; ++u) {
        if (u < count) {
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                w[u][i][0] = load_weight(w_at[i][0] + 32 * u, policy);
                w[u][i][1] = load_weight(w_at[i][1] + 32 * u, policy);
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

    const bf16* x_at = p.x + int64_t(m0 + g) * p.x_stride + k0;
    const int64_t x_step = 8 * p.x_stride;
    uint4 x[X_DEPTH][NT];
#pragma unroll
    for (int u = 0; u < X_DEPTH; ++u) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            x[u][j] = uint4{0, 0, 0, 0};  // rows that are not there
            if (u < count && m0 + 8 * j + g < p.M) x[u][j] = load_activation(x_at + j * x_step + 32 * u);
        }
    }

    const int rows_here_padded = PAIRS ? 16 : 16 * TM;
    const int rotated_heads = p.q_heads + p.kv_heads;
    Extra first_extra{0, 0, 0};
    {
        const int m = m0 + int(threadIdx.x) / rows_here_padded, row = threadIdx.x % rows_here_padded;
        if (EPILOGUE == ADD || EPILOGUE == QKV) {
            if (m < p.M && int(threadIdx.x) < COLUMNS * rows_here_padded && row < rows_here) {
                first_extra = load_extra<EPILOGUE>(p, m, row_base[0] + row, element0 + row, head < rotated_heads);
            }
        }
    }

    float rstd[NT];
    if (NORM) {
        for (int r = warp; r < COLUMNS && m0 + r < p.M; r += warps) {
            const float value = row_rstd(p, m0 + r, lane);
            if (lane == 0) shared[r] = value;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < NT; ++j) rstd[j] = m0 + 8 * j + g < p.M ? shared[8 * j + g] : 0.0f;
        __syncthreads();  // the sums below reuse the place
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
                        mma_16x8x16(sums[i][j], low.x, high.x, low.y, high.y, b.x, b.y);
                        mma_16x8x16(sums[i][j], low.z, high.z, low.w, high.w, b.z, b.w);
                    }
                }
                if (chunk + DEPTH < count) {
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        w[u][i][0] = load_weight(w_at[i][0] + 32 * (chunk + DEPTH), policy);
                        w[u][i][1] = load_weight(w_at[i][1] + 32 * (chunk + DEPTH), policy);
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

    const int outputs = min(COLUMNS, p.M - m0) * rows_here_padded;  // a multiple of 16
    for (int index = threadIdx.x; index < outputs; index += blockDim.x) {
        const int column = index / rows_here_padded, row = index % rows_here_padded, m = m0 + column;
        const float* at = shared + column * STRIDE + row;
        float first = at[0], second = 0.0f;
        for (int v = 1; v < warps; ++v) first += at[v * COLUMNS * STRIDE];
        if (PAIRS) {
            second = at[16];
            for (int v = 1; v < warps; ++v) second += at[16 + v * COLUMNS * STRIDE];
        }
        const bool valid = row < rows_here;
        Extra extra = first_extra;
        if ((EPILOGUE == ADD || EPILOGUE == QKV) && index >= int(blockDim.x) && valid) {
            extra = load_extra<EPILOGUE>(p, m, row_base[0] + row, element0 + row, head < rotated_heads);
        }

        if (EPILOGUE == STORE) {
            if (valid) p.out[int64_t(m) * p.N + row_base[0] + row] = float_to_bf16(first);
        } else if (EPILOGUE == ADD) {
            float squared = 0.0f;
            if (valid) {
                const float sum = round_bf16(round_bf16(first) + bf16_to_float(bf16(extra.a)));
                p.out[int64_t(m) * p.N + row_base[0] + row] = float_to_bf16(sum);
                squared = multiply(sum, sum);
            }
            const uint32_t group = 0xffffu << (lane & 16);  // the 16 weight rows of one part
#pragma unroll
            for (int mask = 8; mask > 0; mask >>= 1) squared += shuffle_xor(group, squared, mask);
            if (row % 16 == 0 && valid) {
                p.sumsq_out[int64_t(m) * ((p.N + 15) / 16) + (row_base[0] + row) / 16] = squared;
            }
        } else if (EPILOGUE == GATE_UP) {
            if (valid) {
                const float gate = round_bf16(first), up = round_bf16(second);
                const float activated = round_bf16(gate / (1.0f + exponential(-gate)));
                p.out[int64_t(m) * p.N + row_base[0] + row] = float_to_bf16(multiply(activated, up));
            }
        } else {
            const int half = p.head_dim / 2;
            float a = round_bf16(first), b = round_bf16(second);
            if (head < rotated_heads) {
                const float from_a = round_bf16(multiply(a, low_float(extra.a)));
                const float from_b = round_bf16(multiply(-b, low_float(extra.b)));
                const float to_b = round_bf16(multiply(b, high_float(extra.a)));
                const float to_a = round_bf16(multiply(a, high_float(extra.b)));
                a = from_a + from_b;
                b = to_b + to_a;
            }
            bf16* to = p.out + (int64_t(m) * p.q_heads + head) * p.head_dim;
            if (head >= rotated_heads) {
                to = p.out_v + extra.cell * p.kv_stride + (head - rotated_heads) * p.head_dim;
            } else if (head >= p.q_heads) {
                to = p.out_k + extra.cell * p.kv_stride + (head - p.q_heads) * p.head_dim;
            }
            to[element0 + row] = float_to_bf16(a);
            to[element0 + row + half] = float_to_bf16(b);
        }
    }
}

}  // namespace slipstream

// One kernel per variant; launch.py holds the same list. MAX_THREADS and MIN_CTAS bound the registers.
#define SKINNY(EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH, MAX_THREADS, MIN_CTAS)                                          \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)                                                \
        skinny_##EPILOGUE##_##NORM##_##NT##_##TM##_##DEPTH##_##X_DEPTH(const __grid_constant__ slipstream::Params p) { \
        extern __shared__ float shared[];                                                                              \
        slipstream::skinny_gemm<EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH>(p, shared);                                    \
    }

#define FOR_ONE_TILE_ROW(EPILOGUE, NORM)       \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 4, 384, 1) \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 2, 256, (NORM ? 2 : 3)) \
    SKINNY(EPILOGUE, NORM, 1, 1, 8, 2, 256, 2)

#define FOR_ALL(EPILOGUE, NORM)                \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 4, 384, 1) \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 2, 256, 2) \
    SKINNY(EPILOGUE, NORM, 2, 2, 3, 1, 512, 1) \
    SKINNY(EPILOGUE, NORM, 4, 2, 2, 1, 384, 1) \
    SKINNY(EPILOGUE, NORM, 8, 2, 2, 1, (NORM ? 256 : 384), 1)

#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
#if SLIPSTREAM_EPILOGUE == 0
FOR_ONE_TILE_ROW(0, 0)
FOR_ONE_TILE_ROW(0, 1)
FOR_ALL(0, 0)
FOR_ALL(0, 1)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ONE_TILE_ROW(1, 0)
FOR_ALL(1, 0)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2, 1)
#else
FOR_ALL(3, 0)
FOR_ALL(3, 1)
#endif
