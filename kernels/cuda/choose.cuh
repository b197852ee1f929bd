// The second kernel of a mixture of experts: the choice of every row's experts from its logits (kernels/route.py has the rule),
// the lists of (row, expert) pairs by expert that expert_gemm.cuh goes through, and, beside it, the shared expert's last
// product. For 1 to 128 rows.
//
// CTA 0 chooses, a warp a row, and makes the lists; it is a latency. Each warp of the others takes a tile of 16 weight rows
// and all of K in order (packed weights, as gate.cuh's).
#pragma once
#include <expert_groups.cuh>

namespace slipstream {

// kernels/cuda/gate_launch.py has the same struct.
struct ChooseParams {
    struct {
        const bf16* weight;     // of the shared expert's last product: [tiles, chunks, 512]
    } common;
    const bf16* x;              // its rows [M, 32 chunks]
    bf16* out;                  // [M, N]
    const float* logits;        // [M, E]
    const float* bias;          // [E]
    int32_t* ids;               // [M, per_token]
    float* gates;               // [M, per_token]
    int32_t* count;             // of entries
    int32_t* entries;           // [most, 4]: expert, first place, rows, 0
    int32_t* order;             // [pairs]
    int32_t* place;             // [pairs]
    int32_t M, E, per_token;
    int32_t N, chunks;
    int32_t groups, groups_kept;
    int32_t normalise;
    int32_t tile_bits;          // 1 << tile_bits: rows of an entry, at most
    int32_t chooses;            // 0: ids are there, only the lists are made
    int32_t lists;              // whether they are made
    float scaling;
};

constexpr int CHOOSE_THREADS = 256, CHOOSE_WARPS = 8, CHOOSE_DEPTH = 8;
constexpr int FEW_PAIRS = 128;  // lists of so many are made by counting

// The largest of the keys of a warp, lane l holding those of experts l + 32 i: its expert, the lowest of equals.
template <int EACH>
__device__ inline int take_best(uint32_t (&keys)[EACH], int lane) {
    uint32_t best[EACH];  // the largest by halves: few comparisons wait for each other
    int which[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        best[i] = keys[i];
        which[i] = i;
    }
#pragma unroll
    for (int distance = 1; distance < EACH; distance *= 2) {
#pragma unroll
        for (int i = 0; i + distance < EACH; i += 2 * distance) {
            const bool later = best[i + distance] > best[i];
            best[i] = later ? best[i + distance] : best[i];
            which[i] = later ? which[i + distance] : which[i];
        }
    }
    const uint32_t most = reduce_max(best[0]);
    const uint32_t chosen = reduce_min(best[0] == most ? uint32_t(lane + 32 * which[0]) : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (chosen == uint32_t(lane + 32 * i)) keys[i] = 0;
    }
    return int(chosen);
}

// The choice of row m, by a warp. bias: of this lane's experts; scores: room for 2 E floats, the warp's own; ids: of all
// pairs. Both in shared memory.
template <int EACH>
__device__ inline void choose_row(const ChooseParams& p, int m, int lane, const float (&bias)[EACH],
                                  const float (&logits)[EACH], float* scores, int32_t* ids) {
    uint32_t keys[EACH];
    float* sums = scores + p.E;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int e = lane + 32 * i;
        const float score = 1.0f / (1.0f + exponential(-logits[i])), sum = score + bias[i];
        keys[i] = e < p.E ? order_key(sum) : 0u;
        if (e < p.E) {
            scores[e] = score;
            if (p.groups > 1) sums[e] = sum;
        }
    }
    sync_warp();
    if (p.groups > 1) keep_groups(p, sums, keys, lane);
    int mine = 0;
#pragma unroll 1
    for (int j = 0; j < p.per_token; ++j) {
        const int chosen = take_best<EACH>(keys, lane);
        if (lane == j) mine = chosen;
    }
    float gate = lane < p.per_token ? scores[mine] : 0.0f, total = 0.0f;
#pragma unroll 1
    for (int j = 0; j < p.per_token; ++j) total += bits_to_float(shuffle(float_to_bits(gate), j));
    if (p.normalise) gate = gate / (total + 1e-20f);
    if (lane < p.per_token) {
        p.ids[m * p.per_token + lane] = mine;
        p.gates[m * p.per_token + lane] = multiply(gate, p.scaling);
        ids[m * p.per_token + lane] = mine;
    }
    sync_warp();  // scores are read: the next row may write its own
}

template <int EACH>
__device__ inline void load_lane(const float* from, int count, int lane, bool there, float (&to)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int e = lane + 32 * i;
        to[i] = there && e < count ? load_fresh(from + e) : 0.0f;
    }
}

template <int EACH>
__device__ inline void choose_rows(const ChooseParams& p, float* scores, int32_t* ids) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float bias[EACH], next[EACH];
    load_lane<EACH>(p.bias, p.E, lane, true, bias);  // a constant
    pdl_wait();
    load_lane<EACH>(p.logits + int64_t(warp) * p.E, p.E, lane, warp < p.M, next);
#pragma unroll 1
    for (int m = warp; m < p.M; m += CHOOSE_WARPS) {
        float logits[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) logits[i] = next[i];
        const int after = m + CHOOSE_WARPS;
        load_lane<EACH>(p.logits + int64_t(after) * p.E, p.E, lane, after < p.M, next);
        choose_row<EACH>(p, m, lane, bias, logits, scores + 2 * p.E * warp, ids);
    }
}

// Lists of at most FEW_PAIRS pairs. ids: of all pairs; what is behind them up to FEW_PAIRS is overwritten.
__device__ inline void count_lists(const ChooseParams& p, int32_t* ids) {
    constexpr int LEADS = 1 << 16;  // the first pair of an entry
    const int i = threadIdx.x, pairs = p.M * p.per_token, padded = (pairs + 3) / 4 * 4;
    if (i >= pairs && i < padded) ids[i] = LEADS - 1;  // behind every expert
    __syncthreads();
    const uint4* all = reinterpret_cast<const uint4*>(ids);
    const int mine = i < pairs ? ids[i] : LEADS - 1;
    int before = 0, rank = 0, same = 0;
#pragma unroll 2
    for (int j = 0; j < padded / 4; ++j) {
        const uint4 v = all[j];
        const int four[4] = {int(v.x), int(v.y), int(v.z), int(v.w)};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            before += four[b] < mine;
            same += four[b] == mine;
            rank += four[b] == mine && 4 * j + b < i;
        }
    }
    const bool leads = i < pairs && rank % (1 << p.tile_bits) == 0;
    __syncthreads();
    if (i < pairs) {
        p.place[i] = before + rank;
        p.order[before + rank] = i / p.per_token;
        if (leads) ids[i] = mine | LEADS;
    }
    __syncthreads();
    if (i >= pairs) return;
    int entries = 0, entry = 0;
#pragma unroll 2
    for (int j = 0; j < padded / 4; ++j) {
        const uint4 v = all[j];
        const int four[4] = {int(v.x), int(v.y), int(v.z), int(v.w)};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            entries += four[b] >> 16;
            entry += four[b] >> 16 && four[b] - LEADS < mine;
        }
    }
    if (i == 0) *p.count = entries;
    if (leads) {
        int32_t* to = p.entries + 4 * (entry + (rank >> p.tile_bits));
        to[0] = mine;
        to[1] = before + rank;
        to[2] = min(1 << p.tile_bits, same - rank);
        to[3] = 0;
    }
}

// Lists of more pairs. rows: [E, 4] masks of the rows that chose an expert, starts: [E] and 8 more.
__device__ inline void mask_lists(const ChooseParams& p, const int32_t* ids, uint32_t* rows, int32_t* starts) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, pairs = p.M * p.per_token;
    const int tile = 1 << p.tile_bits;
    for (int i = thread; i < 4 * p.E; i += CHOOSE_THREADS) rows[i] = 0;
    __syncthreads();
    for (int i = thread; i < pairs; i += CHOOSE_THREADS) {
        const int m = i / p.per_token;
        atomic_or(rows + 4 * ids[i] + m / 32, 1u << (m % 32));
    }
    __syncthreads();
    // Experts of a thread follow each other. Entries (high half) and pairs (low half) before its first one: a scan.
    const int each = (p.E + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
    uint32_t own = 0;
    for (int e = thread * each; e < min(p.E, (thread + 1) * each); ++e) {
        int count = 0;
        for (int i = 0; i < 4; ++i) count += popcount(rows[4 * e + i]);
        own += uint32_t((count + tile - 1) >> p.tile_bits) << 16 | uint32_t(count);
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
    if (thread == CHOOSE_THREADS - 1) *p.count = int32_t(sum >> 16);
    int entry = int((sum - own) >> 16), start = int((sum - own) & 0xffffu);
    for (int e = thread * each; e < min(p.E, (thread + 1) * each); ++e) {
        int count = 0;
        for (int i = 0; i < 4; ++i) count += popcount(rows[4 * e + i]);
        starts[e] = start;
        for (int first = 0; first < count; first += tile) {
            int32_t* to = p.entries + 4 * entry++;
            to[0] = e;
            to[1] = start + first;
            to[2] = min(tile, count - first);
            to[3] = 0;
        }
        start += count;
    }
    __syncthreads();
    for (int i = thread; i < pairs; i += CHOOSE_THREADS) {
        const int m = i / p.per_token;
        const uint32_t* mask = rows + 4 * ids[i];
        int at = starts[ids[i]] + popcount(mask[m / 32] & ((1u << (m % 32)) - 1));
        for (int word = 0; word < m / 32; ++word) at += popcount(mask[word]);
        p.order[at] = m;
        p.place[i] = at;
    }
}

// The shared expert's last product: tiles of this CTA, one a warp.
__device__ inline void shared_down(const ChooseParams& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int tile = (blockIdx.x - 1) * CHOOSE_WARPS + warp, tiles = (p.N + 15) / 16;
    const bool there = tile < tiles;
    const int64_t width = 32 * int64_t(p.chunks);
    const bf16* w_at = p.common.weight + min(tile, tiles - 1) * int64_t(p.chunks) * CHUNK + 8 * lane;
    const uint64_t policy = weight_policy(true);
    uint4 w[CHOOSE_DEPTH][2];
#pragma unroll
    for (int d = 0; d < CHOOSE_DEPTH; ++d) {
        if (there && d < p.chunks) {
            w[d][0] = load_weight(w_at + d * CHUNK, policy);
            w[d][1] = load_weight(w_at + d * CHUNK + CHUNK / 2, policy);
        }
    }
    pdl_wait();
    if (!there) return;
#pragma unroll 1
    for (int m0 = 0; m0 < p.M; m0 += 8) {
        const bf16* x_at = p.x + int64_t(m0 + g) * width + 8 * t;
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int round = 0; round < p.chunks; round += CHOOSE_DEPTH) {
            if (round > 0 || (m0 > 0 && p.chunks > CHOOSE_DEPTH)) {
#pragma unroll
                for (int d = 0; d < CHOOSE_DEPTH; ++d) {
                    if (round + d < p.chunks) {
                        w[d][0] = load_weight(w_at + int64_t(round + d) * CHUNK, policy);
                        w[d][1] = load_weight(w_at + int64_t(round + d) * CHUNK + CHUNK / 2, policy);
                    }
                }
            }
            uint4 x[CHOOSE_DEPTH];
#pragma unroll
            for (int d = 0; d < CHOOSE_DEPTH; ++d) {
                x[d] = uint4{0, 0, 0, 0};
                if (round + d < p.chunks && m0 + g < p.M) x[d] = load_activation(x_at + 32 * (round + d));
            }
#pragma unroll
            for (int d = 0; d < CHOOSE_DEPTH; ++d) {
                if (round + d < p.chunks) {
                    mma_16x8x16(sums, w[d][0].x, w[d][0].y, w[d][0].z, w[d][0].w, x[d].x, x[d].y);
                    mma_16x8x16(sums, w[d][1].x, w[d][1].y, w[d][1].z, w[d][1].w, x[d].z, x[d].w);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int m = m0 + 2 * t + e % 2, n = 16 * tile + g + 8 * (e / 2);
            if (m < p.M && n < p.N) p.out[int64_t(m) * p.N + n] = float_to_bf16(sums[e]);
        }
    }
}

__device__ inline void choose(const ChooseParams& p, float* shared) {
    pdl_launch_dependents();
    if (blockIdx.x > 0) {
        shared_down(p);
        return;
    }
    // Ids of all pairs; then 2 E scores a warp, or [E, 4] masks and [E + 8] starts.
    const int pairs = p.M * p.per_token;
    int32_t* ids = reinterpret_cast<int32_t*>(shared);
    float* scores = shared + (pairs + 3) / 4 * 4;
    if (!p.chooses) {
        pdl_wait();
        for (int i = threadIdx.x; i < pairs; i += CHOOSE_THREADS) ids[i] = load_list(p.ids + i);
    } else if (p.E <= 12 * 32) {
        choose_rows<12>(p, scores, ids);
    } else {
        choose_rows<16>(p, scores, ids);
    }
    if (!p.lists) return;
    __syncthreads();
    if (pairs <= FEW_PAIRS) {
        count_lists(p, ids);
    } else {
        uint32_t* rows = reinterpret_cast<uint32_t*>(scores);
        mask_lists(p, ids, rows, reinterpret_cast<int32_t*>(rows + 4 * p.E));
    }
}

}  // namespace slipstream
