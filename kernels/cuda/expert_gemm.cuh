// The routed experts of a layer over INT4 weights (kernels/int4.py has their order): two kernels, bound by the reading of
// the chosen experts' weights. `route.cuh` wrote which those are: entries of (expert, first place, rows), places being
// the (row, expert) pairs in the order of their experts, `order` the row of each place.
//
// A block is 32 weight rows, as in int4_gemm.cuh, and so are MMAs, conversion and scales: exact integers are multiplied, a
// chunk of 32 k is a group, its sum is multiplied by its scale in fp32. The rows of an entry are an MMA's columns: one
// reading of the weight for all of them, and no column depends on another.
//
// experts_gate_up: a unit is a block of an entry, a CTA takes one after the other; K is cut into 16 parts, a
// warp for each: chunks w, w + 16, .. are warp w's; the sums of the parts are added in their order. silu(gate) * up goes to `out` [place, I].
// experts_down: a CTA owns 32 outputs of all rows; its warps take entries in turn, each with the whole K. Sums of pairs meet
// in shared memory, where each row adds those of its experts, weighted, in the order in which it chose them; or, of many
// rows, in `scratch`, which experts_combine reads.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

// kernels/cuda/expert_launch.py has the same struct.
struct ExpertParams {
    struct {
        const bf16* weight;     // [E * blocks, K / 32, 32 lanes, 4 words]
    } common;
    const bf16* scales;         // [E * blocks, K / 32, 8, 4]
    const bf16* x;              // gate_up: [M, K], row stride x_stride; down: [places, K]
    const int32_t* count;       // of entries
    const int32_t* entries;     // [most, 4]: expert, first place, rows, 0
    const int32_t* order;       // [pairs]: row of x of each place
    const int32_t* place;       // [pairs]: place of each pair m * per_token + j
    const float* gates;         // [pairs]
    const bf16* add;            // [M, N], row stride add_stride; null: nothing is added
    bf16* out;                  // gate_up: [places, N]; down: [M, N]
    float* scratch;             // [places, N]; null: sums of pairs stay in shared memory
    int64_t x_stride, add_stride;
    int32_t M, N, pairs, per_token;
    int32_t most;               // entries that there can be
    int32_t chunks;             // of K
    int32_t blocks;             // of an expert
    int32_t staged;             // lists are copied into shared memory
    int32_t settled;            // lists are there before the wait
    int32_t sums_at;            // floats in front of the sums in shared memory
    int32_t evict_first;
    int32_t sums_in_turn;       // gate_up: places for the sums; with two, one barrier a unit is enough
};

constexpr int SUMS_STRIDE = 36;  // of 32 sums in shared memory: no bank conflicts

// Where this lane's operands of a unit begin. x: of its column of each tile of 8 rows; a column without a row reads the
// entry's first one, and nobody reads its sums.
template <int NT>
struct Operands {
    const bf16 *w, *s, *x[NT];

    __device__ inline void advance(int chunks) {
        w += chunks * 256;
        s += chunks * 32;
#pragma unroll
        for (int j = 0; j < NT; ++j) x[j] += chunks * 32;
    }
};

constexpr int PARTS = 16;  // of gate and up's K

// Sums of a warp over `count` chunks of each unit from `units.first` on, in steps. DEPTH chunks are in flight, also over
// the border to the next unit where `count` is a multiple of DEPTH. units.wait() comes between the first weights, which
// depend on no kernel before, and the first x.
template <int NT, int DEPTH, class Units>
__device__ inline void stream_units(Units& units, int count, uint64_t policy) {
    constexpr int STEP = Units::STEP;  // from one chunk of a warp to its next
    uint4 w[DEPTH], x[DEPTH][NT];
    uint2 s[DEPTH];
    const bool whole = count % DEPTH == 0;
    int unit = units.first;
    bool next = unit < units.last;
    Operands<NT> from{};
    if (next) {
        from = units.at(unit);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (d < count) {
                w[d] = load_weight(from.w + d * STEP * 256, policy);
                s[d] = load_scales(from.s + d * STEP * 32);
            }
        }
    }
    units.wait();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (next && d < count) {
#pragma unroll
            for (int j = 0; j < NT; ++j) x[d][j] = load_activation(from.x[j] + d * STEP * 32);
        }
    }
    while (next) {
        next = unit + units.step < units.last;
        float sums[2][NT][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
            }
        }
        for (int round = 0; round < count; round += DEPTH) {
            int refill = count - round - DEPTH;  // slots that get a later chunk of this unit, or one of the next
            if (refill > 0) {
                from.advance(DEPTH * STEP);
            } else if (next && whole) {
                from = units.at(unit + units.step);
                refill = DEPTH;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (round + d < count) {
                    const uint32_t words[4] = {w[d].x, w[d].y, w[d].z, w[d].w};
                    const float by[4] = {low_float(s[d].x), high_float(s[d].x), low_float(s[d].y), high_float(s[d].y)};
                    uint4 b[NT];
#pragma unroll
                    for (int j = 0; j < NT; ++j) b[j] = x[d][j];
                    if (d < refill) {
                        w[d] = load_weight(from.w + d * STEP * 256, policy);
                        s[d] = load_scales(from.s + d * STEP * 32);
#pragma unroll
                        for (int j = 0; j < NT; ++j) x[d][j] = load_activation(from.x[j] + d * STEP * 32);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        uint32_t a[2][4];
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
#pragma unroll
                            for (int q = 0; q < 4; ++q) a[half][q] = integers(words[2 * half + q / 2], 2 * i + q % 2);
                        }
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            float partial[4];
                            mma_16x8x16_from_zero(partial, a[0][0], a[0][1], a[0][2], a[0][3], b[j].x, b[j].y);
                            mma_16x8x16(partial, a[1][0], a[1][1], a[1][2], a[1][3], b[j].z, b[j].w);
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                sums[i][j][e] = multiply_add(partial[e], by[2 * i + e / 2], sums[i][j][e]);
                            }
                        }
                    }
                }
            }
        }
        units.done(unit, sums);
        unit += units.step;
        if (next && !whole) {
            from = units.at(unit);
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (d < count) {
                    w[d] = load_weight(from.w + d * STEP * 256, policy);
                    s[d] = load_scales(from.s + d * STEP * 32);
#pragma unroll
                    for (int j = 0; j < NT; ++j) x[d][j] = load_activation(from.x[j] + d * STEP * 32);
                }
            }
        }
    }
}

// Lists of entries and places in shared memory, or where they lie.
struct Lists {
    int count;
    const int32_t *entries, *order, *place;
    const float* gates;
};

// By all threads; a barrier at the end.
template <bool DOWN>
__device__ inline Lists read_lists(const ExpertParams& p, float* shared) {
    if (!p.staged) return Lists{load_list(p.count), p.entries, p.order, p.place, p.gates};
    int32_t* to = reinterpret_cast<int32_t*>(shared);
    const int count = load_list(p.count);
    for (int i = threadIdx.x; i < 4 * p.most; i += blockDim.x) to[i] = load_list(p.entries + i);
    int32_t *second = to + 4 * p.most, *third = second + p.pairs;
    for (int i = threadIdx.x; i < p.pairs; i += blockDim.x) {
        second[i] = load_list((DOWN ? p.place : p.order) + i);
        if (DOWN) third[i] = load_list(reinterpret_cast<const int32_t*>(p.gates) + i);
    }
    __syncthreads();
    return Lists{count, to, second, second, reinterpret_cast<const float*>(third)};
}

template <int NT>
struct GateUpUnits {
    static constexpr int STEP = PARTS;
    const ExpertParams& p;
    float* shared;
    Lists lists;
    int first, last, step, lane, warp, turn;

    __device__ inline void wait() {}
    __device__ inline Operands<NT> at(int unit) const {
        const int entry = unit / p.blocks, block = unit - entry * p.blocks;
        const int32_t* e = lists.entries + 4 * entry;
        const int64_t chunk = (int64_t(e[0]) * p.blocks + block) * p.chunks + warp;
        Operands<NT> made{p.common.weight + chunk * 256 + 8 * lane, p.scales + chunk * 32 + 4 * (lane / 4), {}};
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int column = 8 * j + lane / 4, row = lists.order[e[1] + (column < e[2] ? column : 0)];
            made.x[j] = p.x + row * p.x_stride + 32 * warp + 8 * (lane % 4);
        }
        return made;
    }
    __device__ inline void done(int unit, const float (&sums)[2][NT][4]) {
        constexpr int COLUMNS = 8 * NT;
        const int warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
        float* all = shared + p.sums_at + (turn++ & (p.sums_in_turn - 1)) * warps * COLUMNS * SUMS_STRIDE;
        float* mine = all + warp * COLUMNS * SUMS_STRIDE;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    mine[(8 * j + 2 * t + e % 2) * SUMS_STRIDE + 16 * i + g + 8 * (e / 2)] = sums[i][j][e];
                }
            }
        }
        __syncthreads();
        const int entry = unit / p.blocks, block = unit - entry * p.blocks;
        const int32_t* e = lists.entries + 4 * entry;
        for (int index = threadIdx.x; index < 16 * e[2]; index += blockDim.x) {
            const int column = index / 16, row = index % 16;
            const float* from = all + column * SUMS_STRIDE + row;
            float gate = from[0], up = from[16];
#pragma unroll 4
            for (int v = 1; v < warps; ++v) {
                gate += from[v * COLUMNS * SUMS_STRIDE];
                up += from[16 + v * COLUMNS * SUMS_STRIDE];
            }
            gate = round_bf16(gate);
            const float activated = round_bf16(gate / (1.0f + exponential(-gate)));
            p.out[int64_t(e[1] + column) * p.N + 16 * block + row] = float_to_bf16(multiply(activated, round_bf16(up)));
        }
        if (p.sums_in_turn == 1) __syncthreads();
    }
};

template <int NT, int DEPTH>
__device__ inline void experts_gate_up(const ExpertParams& p, float* shared) {
    pdl_wait();
    pdl_launch_dependents();  // not before: the next kernel reads the lists at once
    const Lists lists = read_lists<false>(p, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    GateUpUnits<NT> units{p,    shared, lists, int(blockIdx.x), lists.count * p.blocks, int(gridDim.x), lane, warp, 0};
    stream_units<NT, DEPTH>(units, (p.chunks - warp + PARTS - 1) / PARTS, weight_policy(p.evict_first != 0));
}

template <int NT>
struct DownUnits {
    static constexpr int STEP = 1;
    const ExpertParams& p;
    float* sums_at;
    Lists lists;
    int first, last, step, block, lane;
    bool waited;

    __device__ inline void wait() {
        if (!waited) pdl_wait();
        waited = true;
    }
    __device__ inline Operands<NT> at(int entry) const {
        const int32_t* e = lists.entries + 4 * entry;
        const int64_t chunk = (int64_t(e[0]) * p.blocks + block) * p.chunks;
        Operands<NT> made{p.common.weight + chunk * 256 + 8 * lane, p.scales + chunk * 32 + 4 * (lane / 4), {}};
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int column = 8 * j + lane / 4;
            made.x[j] = p.x + int64_t(e[1] + (column < e[2] ? column : 0)) * 32 * p.chunks + 8 * (lane % 4);
        }
        return made;
    }
    __device__ inline void done(int entry, const float (&sums)[2][NT][4]) {
        const int32_t* at = lists.entries + 4 * entry;
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 8 * j + 2 * t + e % 2, row = g + 8 * (e / 2);
                if (column < at[2]) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (p.scratch != nullptr) {
                            p.scratch[int64_t(at[1] + column) * p.N + 32 * block + 16 * i + row] = sums[i][j][e];
                        } else {
                            sums_at[(at[1] + column) * SUMS_STRIDE + 16 * i + row] = sums[i][j][e];
                        }
                    }
                }
            }
        }
    }
};

template <int NT, int DEPTH>
__device__ inline void experts_down(const ExpertParams& p, float* shared) {
    pdl_launch_dependents();
    if (!p.settled) pdl_wait();
    const Lists lists = read_lists<true>(p, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
    float* sums = shared + p.sums_at;
    DownUnits<NT> units{p, sums, lists, warp, lists.count, int(blockDim.x) / 32, block, lane, p.settled == 0};
    stream_units<NT, DEPTH>(units, p.chunks, weight_policy(p.evict_first != 0));
    if (p.scratch != nullptr) return;
    // Read before the barrier: its latency is not added then.
    const int n = 32 * block + lane;
    float added = 0.0f;
    if (p.add != nullptr && warp < p.M) added = bf16_to_float(p.add[warp * p.add_stride + n]);
    __syncthreads();
    for (int m = warp; m < p.M; m += blockDim.x / 32) {
        float total = 0.0f;
#pragma unroll 8
        for (int pair = m * p.per_token; pair < (m + 1) * p.per_token; ++pair) {
            total += multiply(lists.gates[pair], sums[lists.place[pair] * SUMS_STRIDE + lane]);
        }
        if (p.add != nullptr) total += m == warp ? added : bf16_to_float(p.add[m * p.add_stride + n]);
        p.out[int64_t(m) * p.N + n] = float_to_bf16(total);
    }
}

// A CTA a row, of what experts_down left in scratch.
__device__ inline void experts_combine(const ExpertParams& p) {
    pdl_launch_dependents();
    pdl_wait();
    const int m = blockIdx.x;
    for (int n = threadIdx.x; n < p.N; n += blockDim.x) {
        float total = 0.0f;
        for (int pair = m * p.per_token; pair < (m + 1) * p.per_token; ++pair) {
            total += multiply(p.gates[pair], load_fresh(p.scratch + int64_t(load_list(p.place + pair)) * p.N + n));
        }
        if (p.add != nullptr) total += bf16_to_float(p.add[m * p.add_stride + n]);
        p.out[int64_t(m) * p.N + n] = float_to_bf16(total);
    }
}

}  // namespace slipstream
