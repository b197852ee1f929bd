// y = x W^T for 17 to 64 rows of x and a weight that lies in DRAM, on cards with wgmma: the sum of skinny_gemm.cuh (wgmma
// and mma.sync add alike, bit for bit), K divided over a cluster.
//
// A cluster of four CTAs walks over units of up to 4 GROUPS tiles; each CTA has two of the eight parts of K of every unit,
// whose x comes through the ring beside the weights: a quarter of it a unit.
//
// Warps part: groups of four sum 64 weight rows by all columns, both parts side by side; a few copy, for a slot is many
// copies of 2 KB; the others finish. Behind a unit's last chunk each summing warp sends its tile's sums, the pair of parts
// added, to the CTA of the cluster that finishes this tile, and goes on with the next unit; that CTA adds the four pairs
// in order. Behind the last unit those that summed finish, too: its end has nothing beside it.
//
// First order_x_for_wgmma writes x, the norm applied, as wgmma reads it.
#pragma once
#include <bulk_gemm.cuh>
#include <order_rows.cuh>
#include <warpgroup.cuh>

namespace slipstream {

// kernels/cuda/cluster_launch.py has the same struct.
struct ClusterParams {
    Params common;
    bf16* x_ordered;    // [K / 32, columns, 32] in wgmma's order
    int32_t columns;
    int32_t max_tiles;  // of a unit
};

constexpr int K_CTAS = 4, PARTS = 2 * K_CTAS;
// Warps beside those that sum: those that copy, and as many that finish.
template <int GROUPS>
constexpr int COPY_WARPS = GROUPS > 2 ? 2 : 4;
// Within BARRIER_BYTES. SUMS_LAST: SUMS_FULL of the last unit, for which warps wait that have seen no phase before.
constexpr int SUMS_FULL_AT = 256, SUMS_LAST_AT = 264, SUMS_EMPTY_AT = 272;

// [chunk][8 columns (rows of x)][4 pieces of 8 k][column][8 k].
template <bool NORM>
__device__ inline void order_x_for_wgmma(const ClusterParams& given) {
    const auto place = [&](int m, int t) {
        return reinterpret_cast<uint32_t*>(given.x_ordered) + m / 8 * 128 + m % 8 * 4 + t;
    };
    order_rows<NORM>(given.common, given.columns, place, [&](uint32_t* to, int chunk, const uint4& v) {
        store_for_wgmma(to + int64_t(chunk) * given.columns * 16, v);
    });
}

// The units of a cluster, from its share of all tiles, nearly the same for all clusters. All but the last are of one height,
// and of four tiles at least: so every CTA finishes some, and none says "read" (sums_empty) before all have sent.
struct Units {
    int begin, length, height, count;
    __device__ inline Units(const ClusterParams& given, int cluster, int clusters) {
        const int tiles = given.common.tiles;
        begin = int(int64_t(tiles) * cluster / clusters);
        length = int(int64_t(tiles) * (cluster + 1) / clusters) - begin;
        const int at_least = max(1, (length + given.max_tiles - 1) / given.max_tiles);
        height = max(K_CTAS, (length + at_least - 1) / at_least);
        count = (length + height - 1) / height;
    }
    __device__ inline int tile(int unit) const { return begin + height * unit; }
    __device__ inline int tiles(int unit) const { return min(height, length - height * unit); }
};

// One group of products: a part's chunk, 16 k and 16 k. Runs on.
template <int COLUMNS>
__device__ inline void multiply_chunk(float (&sums)[COLUMNS / 2], const uint4& low, const uint4& high, uint64_t x) {
    wgmma(sums, low, x);
    wgmma(sums, high, wgmma_moved(x, 256));
}

// Adds the pairs of a unit's own tiles and finishes them, by `threads` threads.
template <int EPILOGUE, int COLUMNS, int GROUPS>
__device__ inline void finish_unit(const ClusterParams& given, int tile, int own, uint32_t sums_at, uint32_t sums_full,
                                   uint32_t phase, int rank, int thread, int threads) {
    constexpr int OUTPUTS = TILE_OUTPUTS<EPILOGUE>, BATCH = 4, TILE_SUMS = COLUMNS / 8 * 512;
    const Params& p = given.common;
    const int of_tile = p.M * OUTPUTS, outputs = own * of_tile;  // multiples of 16, or pairs
    for (int index = thread; index - thread < outputs; index += BATCH * threads) {
        Extra extra[BATCH];
        Place place[BATCH];
        uint32_t from[BATCH];
        int m[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = index + b * threads;
            const int local = (i >= of_tile) + (GROUPS > 2 && i >= 2 * of_tile), rest = i - local * of_tile;
            const int row = rest % OUTPUTS;
            m[b] = rest / OUTPUTS;
            from[b] = sums_at + local * TILE_SUMS + m[b] / 8 * 512 + (row % 8 * 4 + m[b] % 8 / 2) * 16 +
                      (row / 8 * 2 + m[b] % 2) * 4;
            place[b] = place_of<EPILOGUE>(p, tile + rank + K_CTAS * local, row);
            extra[b] = Extra{0, 0, 0};
            if (i < outputs) extra[b] = load_extra<EPILOGUE>(p, m[b], place[b]);
        }
        if (index == thread) barrier_wait_for_cluster(sums_full, phase);
        float low[BATCH] = {}, high[BATCH] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (index + b * threads < outputs) {
                float one[K_CTAS], two[K_CTAS];
#pragma unroll
                for (int v = 0; v < K_CTAS; ++v) {
                    one[v] = load_shared_float(from[b] + v * GROUPS * TILE_SUMS);
                    two[v] = PAIRED<EPILOGUE> ? load_shared_float(from[b] + v * GROUPS * TILE_SUMS + 8) : 0.0f;
                }
                low[b] = one[0];
                high[b] = two[0];
#pragma unroll
                for (int v = 1; v < K_CTAS; ++v) {
                    low[b] += one[v];
                    high[b] += two[v];
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (index + b * threads < outputs) finish<EPILOGUE>(p, m[b], place[b], low[b], high[b], extra[b]);
        }
    }
    if (outputs == 0) barrier_wait_for_cluster(sums_full, phase);
}

template <int EPILOGUE, int COLUMNS, int GROUPS>
__device__ inline void cluster_gemm(const ClusterParams& given, float* shared) {
    constexpr int X_CHUNK = 64 * COLUMNS, COPIERS = COPY_WARPS<GROUPS>, FINISHERS = 32 * COPIERS;
    constexpr int OWN_TILES = GROUPS;             // that a CTA finishes, at most
    constexpr int TILE_SUMS = COLUMNS / 8 * 512;  // bytes
    const Params& p = given.common;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank();
    const int chunks = p.K / 32, steps = chunks / PARTS;
    const Units units(given, blockIdx.x / K_CTAS, gridDim.x / K_CTAS);
    const int weight_bytes = given.max_tiles * 2 * CHUNK_BYTES, slot_bytes = weight_bytes + 2 * X_CHUNK;

    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ring = full + BARRIER_BYTES;
    const uint32_t sums_full = full + SUMS_FULL_AT, sums_last = full + SUMS_LAST_AT, sums_empty = full + SUMS_EMPTY_AT;
    const uint32_t sums_at = ring + p.slots * slot_bytes;  // [pair][own tile][8 columns][lane][4]
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, COPIERS);  // also of those without a tile: so none is a round of the ring behind
            barrier_init(empty + 8 * i, 4 * GROUPS);
        }
        barrier_init(sums_full, 1);
        barrier_init(sums_last, 1);
        barrier_init(sums_empty, K_CTAS);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // whoever reaches into another CTA waits until its barriers are there
    // Behind a QKV product attention reads old keys before its wait, so all before this kernel must be done by then.
    if (EPILOGUE != QKV) pdl_launch_dependents();

    if (warp >= 4 * GROUPS + COPIERS) {  // those that finish
        cluster_wait();
        pdl_wait();
        const int thread = threadIdx.x - 32 * (4 * GROUPS + COPIERS);
        for (int unit = 0; unit < units.count; ++unit) {
            const int tile = units.tile(unit), own = (units.tiles(unit) - rank + K_CTAS - 1) / K_CTAS;
            const bool last = unit + 1 == units.count;
            if (thread == 0) barrier_expect(last ? sums_last : sums_full, own * K_CTAS * TILE_SUMS);
            finish_unit<EPILOGUE, COLUMNS, GROUPS>(given, tile, own, sums_at, last ? sums_last : sums_full,
                                                   last ? 0 : unit % 2, rank, thread,
                                                   last ? FINISHERS + 128 * GROUPS : FINISHERS);
            if (!last) {
                sync_some(FINISHERS);  // the sums are read
                if (thread < K_CTAS) barrier_arrive_there(cluster_address(sums_empty, thread));
            }
        }
        sync_warp();
        cluster_arrive();  // no CTA ends while others may reach into it
        cluster_wait();
        return;
    }

    if (warp >= 4 * GROUPS) {  // those that copy: of every slot some tiles
        if (lane == 0) {
            const int mine = warp - 4 * GROUPS;
            const uint64_t policy = weight_policy(p.evict_first != 0), x_policy = weight_policy(false);
            const int64_t to_next = int64_t(COPIERS) * chunks * CHUNK;
            const bool has_x = mine == COPIERS - 1;
            struct {
                int unit, step, tiles;
                const bf16* from;
            } load{0, 0, 0, nullptr};
            const auto begin_unit = [&] {
                if (load.unit == units.count) return;
                load.tiles = units.tiles(load.unit);
                load.from = p.weight + (int64_t(units.tile(load.unit) + mine) * chunks + 2 * rank) * CHUNK;
            };
            const auto advance = [&] {
                load.from += PARTS * CHUNK;
                if (++load.step == steps) {
                    load.step = 0;
                    ++load.unit;
                    begin_unit();
                }
            };
            const auto load_weights = [&](int of) {
                const uint32_t arrives = full + 8 * of;
                const int own = (load.tiles - mine + COPIERS - 1) / COPIERS;
                barrier_expect(arrives, own * 2 * CHUNK_BYTES + (has_x ? 2 * X_CHUNK : 0));
                const bf16* from = load.from;
                uint32_t to = ring + of * slot_bytes + mine * 2 * CHUNK_BYTES;
                for (int i = 0; i < own; ++i, from += to_next, to += COPIERS * 2 * CHUNK_BYTES) {
                    bulk_load(to, from, 2 * CHUNK_BYTES, arrives, policy);
                }
            };
            const auto load_x = [&](int step, int of) {
                if (!has_x) return;
                bulk_load_written(ring + of * slot_bytes + weight_bytes,
                                  given.x_ordered + int64_t(step * PARTS + 2 * rank) * (X_CHUNK / 2), 2 * X_CHUNK,
                                  full + 8 * of, x_policy);
            };
            Cursor at;
            begin_unit();
            int filled = 0;
            for (; filled < p.slots && load.unit < units.count; ++filled, advance(), at.advance(p.slots)) {
                load_weights(filled);
            }
            pdl_wait();  // nothing above reads what another kernel writes
            if (EPILOGUE == QKV) pdl_launch_dependents();
            copies_see_memory();
            for (int i = 0; i < filled; ++i) load_x(i % steps, i);
            for (; load.unit < units.count; advance(), at.advance(p.slots)) {
                barrier_wait(empty + 8 * at.slot, at.phase ^ 1);
                load_weights(at.slot);
                load_x(load.step, at.slot);
            }
        } else {
            pdl_wait();
        }
        sync_warp();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        return;
    }

    cluster_wait();
    pdl_wait();
    const uint32_t weights_at = ring + warp * 2 * CHUNK_BYTES + 16 * lane;
    const uint64_t x_operand = wgmma_operand(ring + weight_bytes, 128, 512);
    const uint32_t send_at =
        cluster_address(sums_at + (rank * OWN_TILES + warp / K_CTAS) * TILE_SUMS + 16 * lane, warp % K_CTAS);
    Cursor at;
    for (int unit = 0; unit < units.count; ++unit) {
        float even[COLUMNS / 2], odd[COLUMNS / 2];
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; ++e) even[e] = odd[e] = 0.0f;
        int before = 0;
        // Two steps: one's weights come from shared memory while the other's products run.
        const auto one_step = [&](int step) {
            const uint32_t slot = at.slot * slot_bytes;
            barrier_wait(full + 8 * at.slot, at.phase);
            const uint32_t from = weights_at + slot;
            const uint4 w0 = load_shared(from), w1 = load_shared(from + CHUNK_BYTES / 2);
            const uint4 w2 = load_shared(from + CHUNK_BYTES), w3 = load_shared(from + CHUNK_BYTES + CHUNK_BYTES / 2);
            const uint64_t x = wgmma_moved(x_operand, slot);
            if (given.columns != 0) {  // always; where this is no branch, ptxas lets every wgmma wait for the one before
                wgmma_fence();
                multiply_chunk<COLUMNS>(even, w0, w1, x);
                multiply_chunk<COLUMNS>(odd, w2, w3, wgmma_moved(x, X_CHUNK));
                wgmma_commit();
                wgmma_wait<1>();
            }
            sync_warp();  // the products of the step before are done: its slot is free
            if (step > 0 && lane == 0) barrier_arrive(empty + 8 * before);
            before = at.slot;
            at.advance(p.slots);
        };
        for (int step = 0; step < steps; step += 2) {
            one_step(step);
            if (step + 1 < steps) one_step(step + 1);
        }
        wgmma_wait<0>();
        sync_warp();
        if (lane == 0) barrier_arrive(empty + 8 * before);
        wgmma_done(even);
        wgmma_done(odd);
        if (warp < units.tiles(unit)) {
            barrier_wait_for_cluster(sums_empty, unit % 2 ^ 1);  // passes in the first unit
            const uint32_t tell = cluster_address(unit + 1 == units.count ? sums_last : sums_full, warp % K_CTAS);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                send_sums(send_at + 512 * j, even[4 * j] + odd[4 * j], even[4 * j + 1] + odd[4 * j + 1],
                          even[4 * j + 2] + odd[4 * j + 2], even[4 * j + 3] + odd[4 * j + 3], tell);
            }
        }
    }
    if (units.count > 0) {
        const int unit = units.count - 1, own = (units.tiles(unit) - rank + K_CTAS - 1) / K_CTAS;
        finish_unit<EPILOGUE, COLUMNS, GROUPS>(given, units.tile(unit), own, sums_at, sums_last, 0, rank,
                                               FINISHERS + threadIdx.x, FINISHERS + 128 * GROUPS);
    }
    sync_warp();
    cluster_arrive();
    cluster_wait();
}

}  // namespace slipstream
