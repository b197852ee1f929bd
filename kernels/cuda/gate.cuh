// The first kernel of a mixture of experts: the norm in front, the logits of its router, and the inner rows of its shared
// expert, all of them products with the same rows of x. For 1 to 128 rows; choose.cuh has the second one.
//
// Weights are packed (pack.py), the router's rows as they are, the shared expert's in pairs of gate and up. A cluster takes
// two tiles of 16 weight rows, each of its CTAs a part of K, each warp of those equal parts of that: lane 4 g + t has k 8 t ..
// 8 t + 7 of a chunk of 32 of row g of x. Sums of warps, then those of CTAs, are added in their order, so a row's bits hang
// on the weights' shape alone. A CTA's part of the weights comes by bulk copies: all of it is on its way before the kernel
// waits for the one in front, and takes no registers, of which that one leaves few.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// kernels/cuda/gate_launch.py has the same struct.
struct GateParams {
    struct {
        const bf16* weight;       // of the router: [tiles, chunks, 512]
    } common;
    const bf16* shared_weight;    // likewise, of the shared expert's gate and up
    const bf16* x;                // [M, K], row stride x_stride
    const bf16* norm_weight;      // [K]; null: x is normed already
    const float* sumsq_in;        // [M, num_sumsq]; null: rows are read instead
    bf16* normed;                 // [M, K], where there is a norm
    float* logits;                // [M, E]
    bf16* inner;                  // [M, I]
    int64_t x_stride;
    int32_t M, K, E, I;
    int32_t num_sumsq;
    int32_t chunks;               // of K
    int32_t chunks_per_warp;
    int32_t parts;                // CTAs of a cluster
    int32_t router_units;         // pairs of tiles
    float eps, inverse_width;     // 1 / K
    int32_t pad;
};

constexpr int GATE_THREADS = 256, GATE_WARPS = 8, GATE_DEPTH = 4, GATE_TILES = 2;
constexpr int GATE_OUTPUTS = 8 * 16 * GATE_TILES;  // of 8 rows: one a thread

// Floats of shared memory: a barrier, warps' sums, parts' sums of the groups of rows that a CTA finishes, pieces of sums of
// squares; behind them, from a multiple of 1024 bytes on, weights. gate_launch.py counts the same.
constexpr int GATE_STRIDE = 16 * GATE_TILES + 4, GATE_SUMS = GATE_WARPS * 8 * GATE_STRIDE;

// What of 8 rows of x a warp holds at once: up to GATE_DEPTH chunks from `chunk` on.
__device__ inline void load_rows(const GateParams& p, int m0, int chunk, int count, int g, int t,
                                 uint4 (&x)[GATE_DEPTH]) {
    const bf16* at = p.x + int64_t(m0 + g) * p.x_stride + 32 * chunk + 8 * t;
#pragma unroll
    for (int d = 0; d < GATE_DEPTH; ++d) {
        x[d] = uint4{0, 0, 0, 0};  // rows that are not there
        if (d < count && m0 + g < p.M) x[d] = load_activation(at + 32 * d);
    }
}

__device__ inline void load_scales_of(const GateParams& p, int chunk, int count, int t, uint4 (&scale)[GATE_DEPTH]) {
    const bf16* at = p.norm_weight + 32 * chunk + 8 * t;
#pragma unroll
    for (int d = 0; d < GATE_DEPTH; ++d) {
        if (d < count) scale[d] = load_activation(at + 32 * d);
    }
}

// 1 / root mean square of row m0 + g, in the bits of row_rstd. All threads of the CTA come here.
__device__ inline float gate_rstd(const GateParams& p, int m0, int g, int t, float* pieces) {
    Params q = {};
    q.x = p.x;
    q.x_stride = p.x_stride;
    q.sumsq_in = p.sumsq_in;
    q.num_sumsq = p.num_sumsq;
    q.M = p.M;
    q.K = p.K;
    q.eps = p.eps;
    q.inverse_width = p.inverse_width;
    if (p.sumsq_in == nullptr || p.num_sumsq % 4) return row_rstd<4>(q, m0 + g, t);
    q.sumsq_in += int64_t(m0) * p.num_sumsq;
    q.M = min(8, p.M - m0);
    put_pieces(q, pieces, GATE_THREADS);
    __syncthreads();
    return rstd_of_pieces(q, pieces, g, t);
}

// What becomes of the sums of 8 rows and two tiles: from the parts' [parts, 8, 32].
__device__ inline void finish_gate(const GateParams& p, int unit, int m0, const float* parts_sums) {
    const int column = threadIdx.x / (16 * GATE_TILES), row = threadIdx.x % (16 * GATE_TILES), m = m0 + column;
    const bool routes = unit < p.router_units;
    if (m >= p.M || (!routes && row % 16 >= 8)) return;
    const float* at = parts_sums + threadIdx.x;
    float sum = at[0], up = routes ? 0.0f : at[8];
    for (int part = 1; part < p.parts; ++part) {
        sum += at[part * GATE_OUTPUTS];
        if (!routes) up += at[part * GATE_OUTPUTS + 8];
    }
    const int tile = GATE_TILES * (routes ? unit : unit - p.router_units) + row / 16;
    if (routes) {
        const int expert = 16 * tile + row % 16;
        if (expert < p.E) p.logits[int64_t(m) * p.E + expert] = sum;
    } else {
        const int at_inner = 8 * tile + row % 16;
        if (at_inner < p.I) p.inner[int64_t(m) * p.I + at_inner] = gated(sum, up);
    }
}

__device__ inline void gate(const GateParams& p, float* all) {
    float* shared = own_shared(all);
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int unit = blockIdx.x / p.parts, part = blockIdx.x - unit * p.parts;
    const int groups = (p.M + 7) / 8, owned = (groups + p.parts - 1) / p.parts;
    float* sums = shared + 32;
    float* of_parts = sums + GATE_SUMS;  // [owned, parts, GATE_OUTPUTS]
    float* pieces = of_parts + owned * p.parts * GATE_OUTPUTS;
    const int before = int(pieces - shared) + 2 * p.num_sumsq;
    const uint32_t weights = shared_address(shared + (before + 255) / 256 * 256), barrier = shared_address(shared);

    // This CTA's chunks, and this warp's.
    const int of_cta = part * GATE_WARPS * p.chunks_per_warp;
    const int cta_count = min(GATE_WARPS * p.chunks_per_warp, p.chunks - of_cta);
    const int first = of_cta + warp * p.chunks_per_warp, count = min(p.chunks_per_warp, p.chunks - first);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        const uint64_t policy = weight_policy(true);
        const bool routes = unit < p.router_units;
        const int tile = GATE_TILES * (routes ? unit : unit - p.router_units);
        const bf16* from = (routes ? p.common.weight : p.shared_weight) + (int64_t(tile) * p.chunks + of_cta) * CHUNK;
        barrier_expect(barrier, 2 * CHUNK * GATE_TILES * cta_count);
        for (int i = 0; i < GATE_TILES; ++i) {
            bulk_load(weights + 2 * CHUNK * i * cta_count, from + int64_t(i) * p.chunks * CHUNK, 2 * CHUNK * cta_count,
                      barrier, policy);
        }
    }
    __syncthreads();
    if (p.parts > 1) cluster_arrive();
    uint4 scale[GATE_DEPTH];
    if (p.norm_weight != nullptr) load_scales_of(p, first, count, t, scale);
    pdl_wait();
    if (p.parts > 1) cluster_wait();  // all CTAs run: they can be written to

    for (int m0 = 0; m0 < p.M; m0 += 8) {
        uint4 x[GATE_DEPTH];
        load_rows(p, m0, first, count, g, t, x);
        float rstd = 0.0f;
        if (p.norm_weight != nullptr) rstd = gate_rstd(p, m0, g, t, pieces);
        if (m0 == 0) barrier_wait(barrier, 0);
        float acc[GATE_TILES][1][4];
#pragma unroll
        for (int i = 0; i < GATE_TILES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][0][e] = 0.0f;
        }
        for (int round = 0; round < count; round += GATE_DEPTH) {
            if (round > 0) {
                load_rows(p, m0, first + round, count - round, g, t, x);
            }
            if (p.norm_weight != nullptr && (round > 0 || (m0 > 0 && count > GATE_DEPTH))) {
                load_scales_of(p, first + round, count - round, t, scale);
            }
#pragma unroll
            for (int d = 0; d < GATE_DEPTH; ++d) {
                if (round + d < count) {
                    const int chunk = first + round + d;
                    uint4 b = x[d];
                    if (p.norm_weight != nullptr) {
                        b = normed(x[d], rstd, scale[d]);
                        if (unit == 0 && m0 + g < p.M) {
                            store_16(p.normed + int64_t(m0 + g) * p.K + 32 * chunk + 8 * t, b);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < GATE_TILES; ++i) {
                        const uint32_t at = weights + 2 * CHUNK * (i * cta_count + chunk - of_cta) + 16 * lane;
                        const uint4 low = load_shared(at), high = load_shared(at + CHUNK);
                        mma_16x8x16(acc[i][0], low.x, low.y, low.z, low.w, b.x, b.y);
                        mma_16x8x16(acc[i][0], high.x, high.y, high.z, high.w, b.z, b.w);
                    }
                }
            }
        }
        put_sums<1, GATE_TILES>(sums, warp, lane, acc);
        __syncthreads();
        const int column = threadIdx.x / (16 * GATE_TILES), row = threadIdx.x % (16 * GATE_TILES);
        float sum = sums[column * GATE_STRIDE + row];
#pragma unroll
        for (int v = 1; v < GATE_WARPS; ++v) sum += sums[(8 * v + column) * GATE_STRIDE + row];
        // The groups are dealt out over the cluster's CTAs.
        const int group = m0 / 8, owner = group % p.parts;
        float* to = of_parts + ((group / p.parts) * p.parts + part) * GATE_OUTPUTS + threadIdx.x;
        if (p.parts > 1) {
            store_there(cluster_address(shared_address(to), owner), sum);
        } else {
            *to = sum;
        }
        __syncthreads();
    }
    if (p.parts > 1) {
        cluster_arrive();
        cluster_wait();
    }
    for (int group = part; group < groups; group += p.parts) {
        finish_gate(p, unit, 8 * group, of_parts + (group / p.parts) * p.parts * GATE_OUTPUTS);
    }
}

}  // namespace slipstream
