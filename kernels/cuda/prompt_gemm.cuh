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
// CTAs of a cluster go in step, `share_x` with neighbouring units, which share the reads of x, and `share_weights` times as
// many with neighbouring columns, which share the reads of weights: 128 x 128 tiles read the L2 faster than it is.
//
// Outputs are finished in registers, where pairs of outputs (rows g and g + 8 of a tile) are one thread's: so all of shared
// memory is the ring's, and while one group finishes, the other's products go on.
#pragma once
#include <bulk_gemm.cuh>
#include <warpgroup.cuh>

namespace slipstream {

// kernels/cuda/prompt_launch.py has the same struct and sizes. Clusters: m_groups / share_weights for each of so many that
// walk over the units.
struct PromptParams {
    Params common;
    bf16* x_ordered;  // [m_groups, K / 32, 16 times 8 columns, 4 pieces of 8 k, 8 columns, 8 k]
    int32_t parts, share_x, share_weights, pad;
};

constexpr int PROMPT_COLUMNS = 128, PROMPT_TILES = 8, PROMPT_THREADS = 384;
constexpr int PROMPT_X_CHUNK = 64 * PROMPT_COLUMNS, PROMPT_SLOT = 2 * (PROMPT_TILES * CHUNK_BYTES + PROMPT_X_CHUNK);
constexpr int PROMPT_WARPS = 4, PROMPT_CHUNKS = 4;  // that order x, of a CTA; chunks of each

// Pieces 0 and 1 of a chunk are the k of its first MMA, 2 and 3 of its second, in the packed weight's order of k. A CTA
// takes 8 rows and PROMPT_WARPS * PROMPT_CHUNKS chunks.
template <bool NORM>
__device__ inline void order_for_wgmma(const PromptParams& given) {
    const Params& p = given.common;
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, chunks = p.K / 32, blocks = (p.M + 7) / 8;
    const int slice = blockIdx.x / blocks, m = 8 * (blockIdx.x - slice * blocks) + g;
    const int first = (slice * PROMPT_WARPS + threadIdx.x / 32) * PROMPT_CHUNKS;
    uint4 scale[PROMPT_CHUNKS] = {}, x[PROMPT_CHUNKS] = {};
#pragma unroll
    for (int i = 0; i < PROMPT_CHUNKS; ++i) {
        if (NORM && first + i < chunks) scale[i] = load_activation(p.norm_weight + 32 * (first + i) + 8 * t);
    }
    pdl_wait();  // nothing above reads what another kernel writes
#pragma unroll
    for (int i = 0; i < PROMPT_CHUNKS; ++i) {
        if (m < p.M && first + i < chunks) x[i] = load_activation(p.x + m * p.x_stride + 32 * (first + i) + 8 * t);
    }
    const float rstd = NORM ? row_rstd<8>(p, m, t) : 0.0f;
    const int group = m / PROMPT_COLUMNS, column = m % PROMPT_COLUMNS;
    uint32_t* const to = reinterpret_cast<uint32_t*>(given.x_ordered) + int64_t(group) * chunks * (PROMPT_X_CHUNK / 4) +
                         column / 8 * 128 + column % 8 * 4 + t;
#pragma unroll
    for (int i = 0; i < PROMPT_CHUNKS; ++i) {
        if (m < p.M && first + i < chunks) {
            const uint4 v = NORM ? normed(x[i], rstd, scale[i]) : x[i];
            uint32_t* const at = to + int64_t(first + i) * (PROMPT_X_CHUNK / 4);
            at[0] = v.x;
            at[32] = v.y;
            at[64] = v.z;
            at[96] = v.w;
        }
    }
}

// A part's chunk: this warp's tile by the columns of x that `x` names. Runs on.
__device__ inline void multiply_chunk(float (&sums)[64], uint32_t weights, uint64_t x) {
    const uint4 low = load_shared(weights), high = load_shared(weights + CHUNK_BYTES / 2);
    wgmma_fence();
    wgmma(sums, low, x);
    wgmma(sums, high, wgmma_moved(x, 256));
    wgmma_commit();
}

// As finish<ADD> for rows g and g + 8 of a tile; the sum of 16 squares in its order. All lanes come here.
__device__ inline void finish_two_rows(const Params& p, int m, const Place (&places)[2], const float (&sums)[2],
                                       const Extra (&extras)[2]) {
    float squared = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = round_bf16(round_bf16(sums[i]) + bf16_to_float(bf16(extras[i].a)));
        const bool there = m < p.M && places[i].valid;
        if (there) p.out[int64_t(m) * p.N + places[i].at] = float_to_bf16(sum);
        const float square = there ? multiply(sum, sum) : 0.0f;
        squared = i == 0 ? square : squared + square;
    }
#pragma unroll
    for (int mask = 16; mask > 2; mask >>= 1) squared += shuffle_xor(0xffffffffu, squared, mask);
    if (places[0].at % 16 == 0 && places[0].valid && m < p.M) {
        p.sumsq_out[int64_t(m) * ((p.N + 15) / 16) + places[0].at / 16] = squared;
    }
}

// A warp's outputs: of one tile of weight rows, 128 rows of x from m0 on.
template <int EPILOGUE>
__device__ inline void finish_tile(const Params& p, int m0, int tile, const float (&sums)[64]) {
    constexpr int ROWS = PAIRED<EPILOGUE> ? 1 : 2, BATCH = EPILOGUE == GATE_UP || EPILOGUE == STORE ? 8 : 4;  // times 8 columns
    const int lane = threadIdx.x % 32, m1 = m0 + lane % 4 * 2;
    Place places[2];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) places[i] = place_of<EPILOGUE>(p, tile, lane / 4 + 8 * i);
#pragma unroll
    for (int first = 0; first < 16; first += BATCH) {
        Extra extras[BATCH][2][2];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int m = m1 + 8 * (first + j) + e;
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    extras[j][e][i] = Extra{0, 0, 0};
                    if (m < p.M) extras[j][e][i] = load_extra<EPILOGUE>(p, m, places[i]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int m = m1 + 8 * (first + j) + e, at = 4 * (first + j) + e;
                if (EPILOGUE == ADD) {
                    finish_two_rows(p, m, places, {sums[at], sums[at + 2]}, extras[j][e]);
                } else if (m < p.M) {
                    finish<EPILOGUE>(p, m, places[0], sums[at], sums[at + 2], extras[j][e][0]);
                    if (ROWS == 2) finish<EPILOGUE>(p, m, places[1], sums[at + 2], 0.0f, extras[j][e][1]);
                }
            }
        }
    }
}

template <int EPILOGUE>
__device__ inline void prompt_gemm(const PromptParams& given, float* shared) {
    constexpr int WARPS = 8, TILES = PROMPT_TILES;  // warps that sum: one for each tile
    const Params& p = given.common;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = p.K / 32, parts = given.parts;
    const int rank = cluster_rank(), ctas = cluster_size(), share_x = given.share_x, share_w = given.share_weights;
    const int place = rank % share_x, weight_place = rank / share_x;
    const int cluster = blockIdx.x / ctas, clusters = p.m_groups / share_w;
    const int first = cluster / clusters * share_x, group = cluster % clusters * share_w + weight_place;
    const int walk = gridDim.x / ctas / clusters * share_x, units = (p.tiles + TILES - 1) / TILES;

    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ring = full + BARRIER_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS * (share_x + share_w - 1));
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

    // Units from `unit` - place on are walked by all CTAs of a cluster, also one that has none: it has a share of x.
    if (warp >= WARPS) {
        fewer_registers<40>();
        if (lane == 0) {
            const int mine = warp - WARPS;  // two tiles and a quarter of x
            const uint64_t policy = weight_policy(false);
            const uint32_t x_mask = ((1 << share_x) - 1) << (weight_place * share_x);  // CTAs that get the same x
            const uint32_t w_mask = (share_w == 1 ? 1 : 1 | 1 << share_x) << place;    // and the same weights
            const bf16* const x_begin = given.x_ordered + int64_t(group) * chunks * (PROMPT_X_CHUNK / 2);
            const int64_t tile_size = int64_t(chunks) * CHUNK;
            copies_see_memory();
            Cursor at;
            for (int unit = first + place; unit - place < units; unit += walk) {
                const int tile = unit * TILES, tiles = max(0, min(TILES, p.tiles - tile)), last = min(2 * mine + 2, tiles);
                for (int part = 0; part < parts; part += 2) {
                    for (int chunk = part; chunk < chunks; chunk += parts) {
                        const int count = part + 1 < parts && chunk + 1 < chunks ? 2 : 1;
                        const uint32_t slot = ring + at.slot * PROMPT_SLOT, arrives = full + 8 * at.slot;
                        barrier_wait(empty + 8 * at.slot, at.phase ^ 1);  // in the first turn every slot is empty
                        if (mine == 0) barrier_expect(arrives, count * (tiles * CHUNK_BYTES + PROMPT_X_CHUNK));
                        for (int i = 2 * mine + weight_place; i < last; i += share_w) {
                            bulk_load_to(slot + i * 2 * CHUNK_BYTES, p.weight + (tile + i) * tile_size + chunk * CHUNK,
                                         count * CHUNK_BYTES, arrives, policy, rank, w_mask);
                        }
                        const int bytes = count * PROMPT_X_CHUNK / (4 * share_x), from = (4 * place + mine) * bytes;
                        bulk_load_to(slot + TILES * 2 * CHUNK_BYTES + from,
                                     x_begin + int64_t(chunk) * (PROMPT_X_CHUNK / 2) + from / 2, bytes, arrives, policy, rank,
                                     x_mask);
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
        // Whose copies wait for this warp's word: of the CTAs that copy to this one, itself among them.
        const bool tells = lane < ctas && (lane % share_x == place || lane / share_x == weight_place);
        const uint32_t tell = cluster_address(empty, tells ? lane : rank);
        const auto release = [&](int slot) {
            sync_warp();
            if (tells) barrier_arrive_there(tell + 8 * slot);
        };
        Cursor at;
        for (int unit = first + place; unit - place < units; unit += walk) {
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
