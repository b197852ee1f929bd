// y = x W^T for prompts, hundreds of rows of x, on cards with wgmma: the sum of skinny_gemm.cuh, part by part of K, so that
// a prompt's rows have the bits that they have when they are decoded (wgmma and mma.sync add alike).
//
// order_for_wgmma writes x, the norm applied, as wgmma reads it. A CTA takes 128 rows of x (columns) and units of eight
// tiles of weight rows, one after the other. Two groups of four warps each sum 64 weight rows by 128 columns: the two parts
// of a pair side by side, and beside them the sum of the pairs before, so that all of K passes through registers: 192 of a
// thread's. Weights come from shared memory into registers, for the packed tile is wgmma's A operand as it is; x is read
// by the matrix unit. A slot of the ring holds a chunk of each part of the pair, of all tiles and of x: 64 k.
//
// Four more warps copy, each a quarter of a slot: one thread alone takes longer over a slot's copies than the products do.
// CTAs of a cluster go in step, with the same units and neighbouring columns, and share the reads of the weights: 128 x 128
// tiles read the L2 faster than it is.
//
// Outputs are finished in registers, where pairs of outputs (rows g and g + 8 of a tile) are one thread's: so all of shared
// memory is the ring's, and while one group finishes, the other's products go on.
#pragma once
#include <bulk_gemm.cuh>
#include <order_rows.cuh>
#include <warpgroup.cuh>

namespace slipstream {

// kernels/cuda/prompt_launch.py has the same struct and sizes. Clusters of n CTAs: m_groups / n, times so many that walk over
// the units.
struct PromptParams {
    Params common;
    bf16* x_ordered;  // [m_groups, K / 32, 16 times 8 columns, 4 pieces of 8 k, 8 columns, 8 k]
    int32_t parts, pad;
};

constexpr int PROMPT_COLUMNS = 128, PROMPT_TILES = 8, PROMPT_THREADS = 384;
constexpr int PROMPT_X_CHUNK = 64 * PROMPT_COLUMNS, PROMPT_SLOT = 2 * (PROMPT_TILES * CHUNK_BYTES + PROMPT_X_CHUNK);

template <bool NORM>
__device__ inline void order_for_wgmma(const PromptParams& given) {
    const int chunks = given.common.K / 32;
    const auto place = [&](int m, int t) {
        const int group = m / PROMPT_COLUMNS, column = m % PROMPT_COLUMNS;
        return reinterpret_cast<uint32_t*>(given.x_ordered) + int64_t(group) * chunks * (PROMPT_X_CHUNK / 4) +
               column / 8 * 128 + column % 8 * 4 + t;
    };
    order_rows<NORM>(given.common, given.common.m_groups * PROMPT_COLUMNS, place, [&](uint32_t* to, int chunk, const uint4& v) {
        store_for_wgmma(to + int64_t(chunk) * (PROMPT_X_CHUNK / 4), v);
    });
}

// A part's chunk: this warp's tile by the columns of x that `x` names. Runs on.
__device__ inline void multiply_chunk(float (&sums)[64], uint32_t weights, uint64_t x) {
    const uint4 low = load_shared(weights), high = load_shared(weights + CHUNK_BYTES / 2);
    wgmma_fence();
    wgmma(sums, low, x);
    wgmma(sums, high, wgmma_moved(x, 256));
    wgmma_commit();
}

// What the end of a row's pairs of outputs reads: ADD: the residual of both; QKV: cos and sin of first and second half.
struct Pairs {
    uint32_t a, b, c, d;
    int32_t cell;
};

template <int EPILOGUE>
__device__ inline Pairs load_pairs(const Params& p, int m, const Place (&places)[2]) {
    Pairs pairs{0, 0, 0, 0, m};
    if (m >= p.M) return pairs;
    if (EPILOGUE == ADD) {
        const bf16* const row = p.residual + m * p.residual_stride;
        if (places[0].valid) pairs.a = *reinterpret_cast<const uint32_t*>(row + places[0].at);
        if (places[1].valid) pairs.b = *reinterpret_cast<const uint32_t*>(row + places[1].at);
    }
    if (EPILOGUE == QKV && places[0].valid) {
        if (places[0].head < p.q_heads + p.kv_heads) {
            const int64_t at = m * p.angle_stride + places[0].at;
            const int half = p.head_dim / 2;
            pairs.a = *reinterpret_cast<const uint32_t*>(p.cos + at);
            pairs.b = *reinterpret_cast<const uint32_t*>(p.cos + at + half);
            pairs.c = *reinterpret_cast<const uint32_t*>(p.sin + at);
            pairs.d = *reinterpret_cast<const uint32_t*>(p.sin + at + half);
        }
        if (p.write_index != nullptr) pairs.cell = int32_t(p.write_index[m]);
    }
    return pairs;
}

// As `gated`, of sums that are rounded; not rounded itself.
__device__ inline float gated_of_rounded(float gate, float up) {
    return multiply(round_bf16(gate / (1.0f + exponential(-gate))), up);
}
// An element of the first half of a head and its partner, rotated.
__device__ inline void rotate(float& a, float& b, float cos_a, float cos_b, float sin_a, float sin_b) {
    const float from_a = round_bf16(multiply(a, cos_a)), from_b = round_bf16(multiply(-b, sin_a));
    const float to_b = round_bf16(multiply(b, cos_b)), to_a = round_bf16(multiply(a, sin_b));
    a = from_a + from_b;
    b = to_b + to_a;
}

// `low` and `high`: the product's outputs n, n + 1 of row m, and those 8 weight rows on, rounded.
template <int EPILOGUE>
__device__ inline void finish_pairs(const Params& p, int m, const Place (&places)[2], uint32_t low, uint32_t high,
                                    const Pairs& pairs) {
    if (EPILOGUE == STORE || EPILOGUE == ADD) {
        bf16* const row = p.out + int64_t(m) * p.N;
        const bool there[2] = {m < p.M && places[0].valid, m < p.M && places[1].valid};
        float squared[2] = {0.0f, 0.0f};
        uint32_t v[2] = {low, high};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (EPILOGUE == ADD) {
                const uint32_t r = i == 0 ? pairs.a : pairs.b;
                v[i] = pack_bf16(low_float(v[i]) + low_float(r), high_float(v[i]) + high_float(r));
                const float a = low_float(v[i]), b = high_float(v[i]);
                const float s = there[i] ? multiply(a, a) : 0.0f, s1 = there[i] ? multiply(b, b) : 0.0f;
                squared[0] = i == 0 ? s : squared[0] + s;
                squared[1] = i == 0 ? s1 : squared[1] + s1;
            }
            if (there[i]) *reinterpret_cast<uint32_t*>(row + places[i].at) = v[i];
        }
        if (EPILOGUE == ADD) {
#pragma unroll
            for (int mask = 2; mask > 0; mask >>= 1) {
#pragma unroll
                for (int e = 0; e < 2; ++e) squared[e] += shuffle_xor(0xffffffffu, squared[e], mask);
            }
            if (there[0] && places[0].at % 16 == 0) {
                p.sumsq_out[int64_t(m) * ((p.N + 15) / 16) + places[0].at / 16] = squared[0] + squared[1];
            }
        }
    } else if (m < p.M && places[0].valid) {
        if (EPILOGUE == GATE_UP) {
            *reinterpret_cast<uint32_t*>(p.out + int64_t(m) * p.N + places[0].at) =
                pack_bf16(gated_of_rounded(low_float(low), low_float(high)),
                          gated_of_rounded(high_float(low), high_float(high)));
        } else {
            const int half = p.head_dim / 2, head = places[0].head;
            float a = low_float(low), b = low_float(high), a1 = high_float(low), b1 = high_float(high);
            bf16* to = p.out + (int64_t(m) * p.q_heads + head) * p.head_dim;
            if (head < p.q_heads + p.kv_heads) {
                rotate(a, b, low_float(pairs.a), low_float(pairs.b), low_float(pairs.c), low_float(pairs.d));
                rotate(a1, b1, high_float(pairs.a), high_float(pairs.b), high_float(pairs.c), high_float(pairs.d));
                if (head >= p.q_heads) to = p.out_k + int64_t(pairs.cell) * p.kv_stride + (head - p.q_heads) * p.head_dim;
            } else {
                to = p.out_v + int64_t(pairs.cell) * p.kv_stride + (head - p.q_heads - p.kv_heads) * p.head_dim;
            }
            *reinterpret_cast<uint32_t*>(to + places[0].at) = pack_bf16(a, a1);
            *reinterpret_cast<uint32_t*>(to + places[0].at + half) = pack_bf16(b, b1);
        }
    }
}

// A warp's outputs: of one tile of weight rows, 128 rows of x from m0 on. A lane has two side by side: half the instructions,
// which do not fit into the instruction cache, and eight rows' 16 bytes are written at once.
template <int EPILOGUE>
__device__ inline void finish_tile(const Params& p, int m0, int tile, const float (&sums)[64]) {
    constexpr int BATCH = 4;
    const int lane = threadIdx.x % 32, m1 = m0 + lane / 4, row = lane % 4 * 2;
    const Place places[2] = {place_of<EPILOGUE>(p, tile, row), place_of<EPILOGUE>(p, tile, PAIRED<EPILOGUE> ? row : row + 8)};
#pragma unroll
    for (int first = 0; first < 16; first += BATCH) {
        Pairs pairs[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) pairs[j] = load_pairs<EPILOGUE>(p, m1 + 8 * (first + j), places);
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int at = 4 * (first + j);
            const uint32_t low = turned(pack_bf16(sums[at], sums[at + 1]));
            const uint32_t high = turned(pack_bf16(sums[at + 2], sums[at + 3]));
            finish_pairs<EPILOGUE>(p, m1 + 8 * (first + j), places, low, high, pairs[j]);
        }
    }
}

template <int EPILOGUE>
__device__ inline void prompt_gemm(const PromptParams& given, float* shared) {
    constexpr int WARPS = 8, TILES = PROMPT_TILES;  // warps that sum: one for each tile
    const Params& p = given.common;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = p.K / 32, parts = given.parts;
    const int rank = cluster_rank(), ctas = cluster_size(), cluster = blockIdx.x / ctas, clusters = p.m_groups / ctas;
    const int first = cluster / clusters, group = cluster % clusters * ctas + rank;
    const int walk = gridDim.x / ctas / clusters, units = (p.tiles + TILES - 1) / TILES;

    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ring = full + BARRIER_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS * ctas);
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // whoever reaches into another CTA waits until its barriers are there
    // Behind a QKV product attention reads old keys before its wait, so all before this kernel must be done by then.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    cluster_wait();
    pdl_wait();
    if (EPILOGUE == QKV) pdl_launch_dependents();

    if (warp >= WARPS) {
        fewer_registers<40>();
        if (lane == 0) {
            const int mine = warp - WARPS;  // two tiles and a quarter of x
            const uint64_t policy = weight_policy(false);
            const bf16* const x_begin = given.x_ordered + int64_t(group) * chunks * (PROMPT_X_CHUNK / 2);
            const int64_t tile_size = int64_t(chunks) * CHUNK;
            copies_see_memory();
            Cursor at;
            for (int unit = first; unit < units; unit += walk) {
                const int tile = unit * TILES, tiles = min(TILES, p.tiles - tile), last = min(2 * mine + 2, tiles);
                for (int part = 0; part < parts; part += 2) {
                    for (int chunk = part; chunk < chunks; chunk += parts) {
                        const int count = part + 1 < parts && chunk + 1 < chunks ? 2 : 1;
                        const uint32_t slot = ring + at.slot * PROMPT_SLOT, arrives = full + 8 * at.slot;
                        barrier_wait(empty + 8 * at.slot, at.phase ^ 1);  // in the first turn every slot is empty
                        if (mine == 0) barrier_expect(arrives, count * (tiles * CHUNK_BYTES + PROMPT_X_CHUNK));
                        for (int i = 2 * mine + rank; i < last; i += ctas) {
                            bulk_load_to(slot + i * 2 * CHUNK_BYTES, p.weight + (tile + i) * tile_size + chunk * CHUNK,
                                         count * CHUNK_BYTES, arrives, policy, rank, (1u << ctas) - 1);
                        }
                        const int bytes = count * PROMPT_X_CHUNK / 4, from = mine * bytes;
                        bulk_load_to(slot + TILES * 2 * CHUNK_BYTES + from,
                                     x_begin + int64_t(chunk) * (PROMPT_X_CHUNK / 2) + from / 2, bytes, arrives, policy, rank,
                                     1u << rank);
                        at.advance(p.slots);
                    }
                }
            }
        }
        sync_warp();
    } else {
        more_registers<232>();
        const uint32_t weights_at = ring + warp * 2 * CHUNK_BYTES + 16 * lane;
        const uint64_t x_at = wgmma_operand(ring + TILES * 2 * CHUNK_BYTES, 128, 512);
        const bool tells = lane < ctas;  // all of the cluster: their copies wait for this warp's word
        const uint32_t tell = cluster_address(empty, tells ? lane : rank);
        const auto release = [&](int slot) {
            sync_warp();
            if (tells) barrier_arrive_there(tell + 8 * slot);
        };
        Cursor at;
        for (int unit = first; unit < units; unit += walk) {
            const int tile = unit * TILES;
            const bool there = tile + warp / 4 * 4 < p.tiles;  // any of this group's tiles
            float total[64];
            for (int part = 0; part < parts; part += 2) {
                const bool pair = part + 1 < parts;
                float even[64], odd[64];
#pragma unroll
                for (int i = 0; i < 64; ++i) even[i] = odd[i] = 0.0f;
                const int steps = (chunks - part + parts - 1) / parts;
                const int whole = there && pair ? (chunks - part - 2 + parts) / parts : 0;  // have both chunks
                int step = 0, before = 0;
                for (; step < whole; ++step) {
                    const uint32_t slot = at.slot * PROMPT_SLOT;
                    barrier_wait(full + 8 * at.slot, at.phase);
                    multiply_chunk(even, weights_at + slot, wgmma_moved(x_at, slot));
                    wgmma_wait<1>();
                    if (step > 0) release(before);
                    multiply_chunk(odd, weights_at + slot + CHUNK_BYTES, wgmma_moved(x_at, slot + PROMPT_X_CHUNK));
                    wgmma_wait<1>();
                    before = at.slot;
                    at.advance(p.slots);
                }
                wgmma_wait<0>();
                if (whole > 0) release(before);
                for (; step < steps; ++step) {  // the odd part has ended, or is not there
                    const uint32_t slot = at.slot * PROMPT_SLOT;
                    barrier_wait(full + 8 * at.slot, at.phase);
                    if (there) {
                        multiply_chunk(even, weights_at + slot, wgmma_moved(x_at, slot));
                        wgmma_wait<0>();
                    }
                    release(at.slot);
                    at.advance(p.slots);
                }
                wgmma_done(even);
                wgmma_done(odd);
                if (pair) {
#pragma unroll
                    for (int i = 0; i < 64; ++i) even[i] += odd[i];
                }
                if (part == 0) {
#pragma unroll
                    for (int i = 0; i < 64; ++i) total[i] = even[i];
                } else {
#pragma unroll
                    for (int i = 0; i < 64; ++i) total[i] += even[i];
                }
            }
            if (there) finish_tile<EPILOGUE>(p, group * PROMPT_COLUMNS, tile + warp, total);
        }
        sync_warp();
    }
    cluster_arrive();  // no CTA ends while others may reach into it
    cluster_wait();
}

}  // namespace slipstream
