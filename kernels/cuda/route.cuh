// The router of a layer in one kernel: logits = x W^T in fp32, sigmoid, the choice of experts (kernels/route.py has the
// rule), and the lists of (row, expert) pairs by expert that expert_gemm.cuh goes through. For 1 to 128 rows.
//
// W is plain [E, K] bf16. A CTA takes 16 experts and a part of K, its warps equal parts of that: MMAs with the experts as
// rows, the rows of x as columns; lane 4 g + t reads k 8 t .. 8 t + 7 of a chunk of 32 of row g, of both. The cut hangs on
// the shape alone, sums of warps and CTAs are added in their order. The CTA that ends last does the rest: a warp a row.
#pragma once
#include <expert_groups.cuh>

namespace slipstream {

enum RouteStage {
    ROUTE = 0,         // all of it
    LOGITS = 1,        // only the logits, to `logits`
    FROM_LOGITS = 2,   // one CTA: sums [M, E] are the logits
    FROM_IDS = 3,      // one CTA: ids are there, only the lists are made
};

// kernels/cuda/route_launch.py has the same struct.
struct RouteParams {
    struct {
        const bf16* weight;     // [E, K]
    } common;
    const bf16* x;              // [M, K], row stride x_stride
    const float* bias;          // [E]
    float* sums;                // [parts, M, E]
    float* logits;              // [M, E]
    int32_t* arrived;           // 0 between launches
    int32_t* ids;               // [M, per_token]
    float* gates;               // [M, per_token]
    int32_t* count;             // of entries
    int32_t* entries;           // [most, 4]: expert, first place, rows, 0
    int32_t* order;             // [pairs]
    int32_t* place;             // [pairs]
    int64_t x_stride;
    int32_t stage;
    int32_t M, E, per_token;
    int32_t chunks;             // of K
    int32_t chunks_per_warp;
    int32_t parts;              // CTAs along K
    int32_t groups, groups_kept;
    int32_t normalise;
    int32_t tile;               // rows of an entry, at most
    int32_t selects;            // FROM_IDS, ROUTE: lists are made
    float scaling;
    int32_t pad;
};

constexpr int ROUTE_THREADS = 256, ROUTE_DEPTH = 4;
constexpr int LANE_EXPERTS = 16;  // E is at most 32 times that

// The largest of the keys of a warp, lane l holding those of experts l + 32 i: its expert, the lowest of equals.
__device__ inline int take_best(uint32_t (&keys)[LANE_EXPERTS], int lane, int per_lane) {
    uint32_t best = 0, id = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
        if (i < per_lane && keys[i] > best) {
            best = keys[i];
            id = lane + 32 * i;
        }
    }
    const uint32_t most = reduce_max(best);
    const uint32_t chosen = reduce_min(best == most ? id : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
        if (chosen == uint32_t(lane + 32 * i)) keys[i] = 0;
    }
    return int(chosen);
}

// Logits of 8 rows from m0 on, by ROUTE_THREADS threads: the parts' sums, added in their order. to: [8, 2 E], rows first.
// One CTA does this while nothing else runs: only what it has in flight hides the L2's latency.
__device__ inline void add_parts(const RouteParams& p, int m0, float* to) {
    constexpr int SUMS = 6;  // a thread has in flight, 8 parts of each
    const int count = min(8, p.M - m0) * p.E;
    for (int first = threadIdx.x; first < count; first += SUMS * ROUTE_THREADS) {
        float sum[SUMS];
#pragma unroll
        for (int a = 0; a < SUMS; ++a) sum[a] = 0.0f;
        for (int part = 0; part < p.parts; part += 8) {
            float v[SUMS][8];
#pragma unroll
            for (int a = 0; a < SUMS; ++a) {
                const int i = first + a * ROUTE_THREADS;
                const float* from = p.sums + (int64_t(part) * p.M + m0) * p.E + i;
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    if (i < count && part + b < p.parts) v[a][b] = load_fresh(from + int64_t(b) * p.M * p.E);
                }
            }
#pragma unroll
            for (int a = 0; a < SUMS; ++a) {
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    if (part + b < p.parts) sum[a] = part + b == 0 ? v[a][b] : sum[a] + v[a][b];
                }
            }
        }
#pragma unroll
        for (int a = 0; a < SUMS; ++a) {
            const int i = first + a * ROUTE_THREADS;
            if (i < count) to[i / p.E * 2 * p.E + i % p.E] = sum[a];
        }
    }
}

// The choice of row m, by a warp. scores: its logits, and room for E floats behind. bias: [E], and ids, of
// all pairs: in shared memory.
__device__ inline void choose_row(const RouteParams& p, int m, int lane, float* scores, const float* bias,
                                  int32_t* ids) {
    const int per_lane = (p.E + 31) / 32;
    uint32_t keys[LANE_EXPERTS];
    float* biased = scores + p.E;
    float score[LANE_EXPERTS], sum[LANE_EXPERTS];  // all at once: a store between two of them would put them in a row
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
        const int e = lane + 32 * i;
        score[i] = e < p.E ? scores[e] : 0.0f;
        sum[i] = e < p.E && p.stage != LOGITS ? bias[e] : 0.0f;
    }
    if (p.stage != LOGITS) {
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; ++i) {
            score[i] = 1.0f / (1.0f + exponential(-score[i]));
            sum[i] = score[i] + sum[i];
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
        const int e = lane + 32 * i;
        keys[i] = e < p.E ? order_key(sum[i]) : 0u;
        if (e < p.E) {
            if (p.stage == LOGITS) {
                p.logits[int64_t(m) * p.E + e] = score[i];
            } else {
                scores[e] = score[i];
                biased[e] = sum[i];
            }
        }
    }
    if (p.stage == LOGITS) return;
    sync_warp();
    if (p.groups > 1) keep_groups(p, biased, keys, lane);
    int mine = 0;
    for (int j = 0; j < p.per_token; ++j) {
        const int chosen = take_best(keys, lane, per_lane);
        if (lane == j) mine = chosen;
    }
    float gate = lane < p.per_token ? scores[mine] : 0.0f, total = 0.0f;
    for (int j = 0; j < p.per_token; ++j) total += bits_to_float(shuffle(float_to_bits(gate), j));
    if (p.normalise) gate = gate / (total + 1e-20f);
    if (lane < p.per_token) {
        p.ids[m * p.per_token + lane] = mine;
        p.gates[m * p.per_token + lane] = multiply(gate, p.scaling);
        ids[m * p.per_token + lane] = mine;
    }
}

// Lists of the pairs by expert, by ROUTE_THREADS threads. ids: of all pairs; rows: [E, 4] masks of the rows that chose an
// expert, starts: [E] and 8 more.
__device__ inline void make_lists(const RouteParams& p, const int32_t* ids, uint32_t* rows, int32_t* starts) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, pairs = p.M * p.per_token;
    for (int i = thread; i < 4 * p.E; i += ROUTE_THREADS) rows[i] = 0;
    __syncthreads();
    for (int i = thread; i < pairs; i += ROUTE_THREADS) {
        const int m = i / p.per_token;
        atomic_or(rows + 4 * ids[i] + m / 32, 1u << (m % 32));
    }
    __syncthreads();
    // Experts of a thread follow each other. Entries (high half) and pairs (low half) before its first one: a scan.
    const int each = (p.E + ROUTE_THREADS - 1) / ROUTE_THREADS;
    uint32_t own = 0;
    for (int e = thread * each; e < min(p.E, (thread + 1) * each); ++e) {
        int count = 0;
        for (int i = 0; i < 4; ++i) count += popcount(rows[4 * e + i]);
        own += uint32_t((count + p.tile - 1) / p.tile) << 16 | uint32_t(count);
    }
    uint32_t sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = shuffle(sum, max(lane - distance, 0));
        if (lane >= distance) sum += other;
    }
    int32_t* warps = starts + p.E;
    if (lane == 31) warps[warp] = int32_t(sum);
    __syncthreads();
    for (int i = 0; i < warp; ++i) sum += uint32_t(warps[i]);
    if (thread == ROUTE_THREADS - 1) *p.count = int32_t(sum >> 16);
    int entry = int((sum - own) >> 16), start = int((sum - own) & 0xffffu);
    for (int e = thread * each; e < min(p.E, (thread + 1) * each); ++e) {
        int count = 0;
        for (int i = 0; i < 4; ++i) count += popcount(rows[4 * e + i]);
        starts[e] = start;
        for (int first = 0; first < count; first += p.tile) {
            int32_t* to = p.entries + 4 * entry++;
            to[0] = e;
            to[1] = start + first;
            to[2] = min(p.tile, count - first);
            to[3] = 0;
        }
        start += count;
    }
    __syncthreads();
    for (int i = thread; i < pairs; i += ROUTE_THREADS) {
        const int m = i / p.per_token;
        const uint32_t* mask = rows + 4 * ids[i];
        int at = starts[ids[i]] + popcount(mask[m / 32] & ((1u << (m % 32)) - 1));
        for (int word = 0; word < m / 32; ++word) at += popcount(mask[word]);
        p.order[at] = m;
        p.place[i] = at;
    }
}

// This CTA's sums of the product, into `sums`.
__device__ inline void product(const RouteParams& p, float* shared) {
    constexpr int WARPS = ROUTE_THREADS / 32, STRIDE = 20;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int tile = blockIdx.x / p.parts, part = blockIdx.x - tile * p.parts;
    const int first = (part * WARPS + warp) * p.chunks_per_warp, count = min(p.chunks_per_warp, p.chunks - first);
    const int64_t width = 32 * int64_t(p.chunks);
    // Experts that are not there: the last one's row; nobody reads their sums.
    const bf16* low = p.common.weight + min(16 * tile + g, p.E - 1) * width + 32 * first + 8 * t;
    const bf16* high = p.common.weight + min(16 * tile + g + 8, p.E - 1) * width + 32 * first + 8 * t;
    const uint64_t policy = weight_policy(true);
    uint4 w[ROUTE_DEPTH][2];
#pragma unroll
    for (int d = 0; d < ROUTE_DEPTH; ++d) {
        if (d < count) {
            w[d][0] = load_weight(low + 32 * d, policy);
            w[d][1] = load_weight(high + 32 * d, policy);
        }
    }
    pdl_wait();
    for (int m0 = 0; m0 < p.M; m0 += 8) {
        const bf16* x_at = p.x + min(m0 + g, p.M - 1) * p.x_stride + 32 * first + 8 * t;
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int round = 0; round < count; round += ROUTE_DEPTH) {
            if (round > 0 || (m0 > 0 && count > ROUTE_DEPTH)) {
#pragma unroll
                for (int d = 0; d < ROUTE_DEPTH; ++d) {
                    if (round + d < count) {
                        w[d][0] = load_weight(low + 32 * (round + d), policy);
                        w[d][1] = load_weight(high + 32 * (round + d), policy);
                    }
                }
            }
            uint4 x[ROUTE_DEPTH];
#pragma unroll
            for (int d = 0; d < ROUTE_DEPTH; ++d) {
                if (round + d < count) x[d] = load_activation(x_at + 32 * (round + d));
            }
#pragma unroll
            for (int d = 0; d < ROUTE_DEPTH; ++d) {
                if (round + d < count) {
                    mma_16x8x16(sums, w[d][0].x, w[d][1].x, w[d][0].y, w[d][1].y, x[d].x, x[d].y);
                    mma_16x8x16(sums, w[d][0].z, w[d][1].z, w[d][0].w, w[d][1].w, x[d].z, x[d].w);
                }
            }
        }
        float* mine = shared + warp * 8 * STRIDE;
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[(2 * t + e % 2) * STRIDE + g + 8 * (e / 2)] = sums[e];
        __syncthreads();
        const int column = threadIdx.x / 16, row = threadIdx.x % 16, m = m0 + column, expert = 16 * tile + row;
        if (column < 8 && m < p.M && expert < p.E) {
            float sum = shared[column * STRIDE + row];
#pragma unroll
            for (int v = 1; v < WARPS; ++v) sum += shared[(8 * v + column) * STRIDE + row];
            p.sums[(int64_t(part) * p.M + m) * p.E + expert] = sum;
        }
        __syncthreads();
    }
}

__device__ inline void route(const RouteParams& p, float* shared) {
    pdl_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t* last = reinterpret_cast<int32_t*>(shared) + 8 * 8 * 20;
    if (p.stage == ROUTE || p.stage == LOGITS) {
        product(p, shared);
        memory_fence();
        __syncthreads();
        if (threadIdx.x == 0) *last = atomic_add(p.arrived, 1) == int(gridDim.x) - 1;
        __syncthreads();
        if (!*last) return;
        memory_fence();
        if (threadIdx.x == 0) *p.arrived = 0;
    } else {
        pdl_wait();
    }
    // Over the sums of the product: [E, 4] masks, [E + 8] starts, ids of pairs, E biases, 2 E scores a warp.
    __syncthreads();
    uint32_t* rows = reinterpret_cast<uint32_t*>(shared);
    int32_t* starts = reinterpret_cast<int32_t*>(rows + 4 * p.E);
    int32_t* ids = starts + p.E + 8;
    float* bias = reinterpret_cast<float*>(ids + p.M * p.per_token);
    float* scores = bias + p.E;
    if (p.stage == FROM_IDS) {
        for (int i = threadIdx.x; i < p.M * p.per_token; i += ROUTE_THREADS) ids[i] = load_list(p.ids + i);
    } else {
        // Cold lines of the memory: asked for before the sums, not one after the other behind them.
        constexpr int EACH = 32 * LANE_EXPERTS / ROUTE_THREADS;
        float mine[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int e = threadIdx.x + i * ROUTE_THREADS;
            mine[i] = p.stage != LOGITS && e < p.E ? load_fresh(p.bias + e) : 0.0f;
        }
        for (int m0 = 0; m0 < p.M; m0 += 8) {
            add_parts(p, m0, scores);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int e = threadIdx.x + i * ROUTE_THREADS;
                if (e < p.E) bias[e] = mine[i];
            }
            __syncthreads();
            if (m0 + warp < p.M) choose_row(p, m0 + warp, lane, scores + warp * 2 * p.E, bias, ids);
            __syncthreads();
        }
    }
    if (p.stage == LOGITS || !p.selects) return;
    __syncthreads();
    make_lists(p, ids, rows, starts);
}

}  // namespace slipstream
