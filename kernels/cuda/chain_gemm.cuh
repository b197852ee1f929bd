// Products of which each reads what the one before wrote, in one kernel: output projection, gate and up, down, and
// queries, keys and values of the next layer or a head. The sums of bulk_gemm.cuh, bit for bit.
//
// Between two kernels the memory rests for about 3 us: the last CTA's stores are flushed, the next kernel's wait returns,
// x arrives, and until then its ring is full. Here one CTA stands on every SM for all products. Its copying thread goes on
// into the next weight without a stop, while the others wait until all CTAs are done with the product; the ring is as
// long as that takes (140 KB: 4 us). One word of memory counts the CTAs that are done, of each product.
//
// All CTAs must be on the card together: one each SM, and what they take the place of ends by itself.
//
// A slot of the ring holds one chunk of each part, of one tile. Units are dealt out as in bulk_gemm.cuh.
#pragma once
#include <bulk_gemm.cuh>

namespace slipstream {

constexpr int MAX_PRODUCTS = 4, MAX_CHAIN_SLOTS = 24;
// In front of the ring: of each slot one "full" and one "empty", then the unit that lies in it (-1: no more of a product).
constexpr int CHAIN_UNITS_AT = 16 * MAX_CHAIN_SLOTS, CHAIN_BARRIER_BYTES = 512;

// kernels/cuda/chain_launch.py has the same struct.
struct ChainParams {
    Params common;                    // of the first product, and of the ring
    Params then[MAX_PRODUCTS - 1];    // of the others
    int32_t* arrived;                 // [MAX_PRODUCTS], zero but while this runs: CTAs that are done with a product
    int32_t count;                    // products
    int32_t pad;
};

// Tiles of a unit of the product of this number: two where x does not stay in registers, to read it half as often.
__host__ __device__ constexpr int chain_tiles(int product) { return product == 2 ? 2 : 1; }

// Where its parts lie, from few registers.
struct ChainRing {
    float* shared;
    uint32_t begin;  // the address of `shared`
    int slots, slot_bytes;
    __device__ inline uint32_t full(const Cursor& at) const { return begin + 8 * at.slot; }
    __device__ inline uint32_t empty(const Cursor& at) const { return begin + 8 * MAX_CHAIN_SLOTS + 8 * at.slot; }
    __device__ inline uint32_t data(const Cursor& at) const { return begin + CHAIN_BARRIER_BYTES + at.slot * slot_bytes; }
    __device__ inline volatile int32_t& unit(const Cursor& at) const {
        return reinterpret_cast<volatile int32_t*>(shared + CHAIN_UNITS_AT / 4)[at.slot];
    }
};

// The copying thread's part of one product.
__device__ inline void copy_product(const Params& p, const ChainRing& ring, Cursor& at, int warps, int tiles, bool first,
                                    bool last) {
    const uint64_t policy = weight_policy(p.evict_first != 0);
    const int grid = gridDim.x, chunks = p.K / 32, units = p.tiles / tiles;
    const int of_unit = (chunks + warps - 1) / warps * tiles;  // slots
    const bool handed_out = p.fixed * grid < units;
    int unit = blockIdx.x, chunk = 0, tile = 0, next = -1, taken = 1;  // -1: not known yet
    bool waited = !first, let_go = false;
    const auto take = [&] {
        if (!handed_out || taken < p.fixed) {
            ++taken;
            return unit + grid;
        }
        const int asked = atomic_add(p.counter, 1);
        if (asked == units - p.fixed * grid + grid - 1) *p.counter = 0;  // each CTA asks once too often
        return p.fixed * grid + asked;
    };
    const auto bytes_from = [&](int from) { return min(warps, chunks - from) * CHUNK_BYTES; };
    const auto weights = [&](int of, int i, int from) {
        return p.weight + ((int64_t(of) * tiles + i) * chunks + from) * CHUNK;
    };
    const auto load_slot = [&] {
        const bool may_ask = waited || !handed_out || taken < p.fixed;
        if (next < 0 && may_ask && chunk + 4 * warps >= chunks) next = take();
        barrier_wait(ring.empty(at), at.phase ^ 1);  // in the first turn every slot is empty
        ring.unit(at) = unit;
        barrier_expect(ring.full(at), bytes_from(chunk));
        bulk_load(ring.data(at), weights(unit, tile, chunk), bytes_from(chunk),
                  ring.full(at), policy);
        at.advance(ring.slots);
        if (++tile < tiles) return;
        tile = 0;
        chunk += warps;
        if (chunk >= chunks) {
            chunk = 0;
            unit = next;
            next = -1;
        }
    };
    if (first) {
        const int own = min(p.fixed, (units - int(blockIdx.x) + grid - 1) / grid), filled = min(ring.slots, own * of_unit);
        for (int i = 0; i < filled; ++i) load_slot();
        pdl_wait();  // the next kernel never starts before this (bulk_gemm.cuh)
        waited = true;
        for (int i = filled; i < min(filled + p.ahead, own * of_unit); ++i) {
            const int of = int(blockIdx.x) + i / of_unit * grid, from = i % of_unit / tiles * warps;
            bulk_prefetch(weights(of, i % tiles, from), bytes_from(from), policy);
        }
        if (unit < 0) unit = take();
    }
    while (unit < units) {
        const int slots_left = ((chunks - chunk + warps - 1) / warps) * tiles - tile;
        if (last && !let_go && unit + grid >= units && slots_left <= p.left) {
            pdl_launch_dependents();
            let_go = true;
        }
        load_slot();
    }
    if (last && !let_go) pdl_launch_dependents();
    barrier_wait(ring.empty(at), at.phase ^ 1);
    ring.unit(at) = -1;
    barrier_arrive(ring.full(at));
    at.advance(ring.slots);
}

// The other warps' part. `before`: counts the CTAs that are done with the product before (null: a kernel was before);
// `after`: those that are done with this one.
template <int EPILOGUE, bool NORM, int TM, int X_DEPTH, bool RESIDENT, int MAX_WARPS>
__device__ inline void sum_product(const Params& p, const ChainRing& ring, Cursor& at, float* all_sums, int32_t* before,
                                   int32_t* after) {
    static_assert(RESIDENT || !NORM, "x is normed once");
    constexpr int BUFFERS = RESIDENT ? 2 : 1;  // of sums
    constexpr int SUMS = 8 * (16 * TM + 4);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32 - 1, threads = 32 * warps;
    const int g = lane / 4, t = lane % 4, chunks = p.K / 32;
    const int most = p.chunks_per_part, count = most - ((most - 1) * warps + warp < chunks ? 0 : 1);
    const int k0 = 32 * warp + 8 * t, k_step = 32 * warps;
    const bool mine = g < p.M;
    uint4* const all_scales = reinterpret_cast<uint4*>(all_sums);  // the norm's weight, before there are sums
    if (NORM) {
        for (int i = threadIdx.x; i < p.K / 8; i += threads) all_scales[i] = load_activation(p.norm_weight + 8 * i);
    }
    if (before == nullptr) {
        pdl_wait();
    } else {
        if (threadIdx.x == 0) wait_for_all(before, gridDim.x);
        sync_some(threads);
    }

    const bf16* const x_begin = p.x + int64_t(g) * p.x_stride + k0;
    uint4 x[X_DEPTH];
    const auto load_x = [&] {
#pragma unroll
        for (int u = 0; u < X_DEPTH; ++u) {
            x[u] = uint4{0, 0, 0, 0};  // rows that are not there
            if (u < count && mine) x[u] = load_activation(x_begin + u * k_step);
        }
    };
    load_x();
    if (NORM) {
        const bool together = p.sumsq_in != nullptr && p.num_sumsq % 4 == 0 && p.num_sumsq <= p.K / 16;
        float* const pieces = all_sums + p.K / 2;
        if (together) put_pieces(p, pieces, threads);
        sync_some(threads);
        const float rstd = together ? rstd_of_pieces(p, pieces, g, t) : row_rstd<8>(p, g, t);
#pragma unroll
        for (int u = 0; u < X_DEPTH; ++u) {
            if (u < count) x[u] = normed(x[u], rstd, all_scales[4 * (u * warps + warp) + t]);
        }
        sync_some(threads);
    }

    int buffer = 0;
    while (true) {
        barrier_wait(ring.full(at), at.phase);
        const int unit = ring.unit(at);
        if (unit < 0) break;
        const Extra extra = load_first_extra<EPILOGUE, 1, TM>(p, 0, unit * TM);
        float sums[TM][1][4];
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][0][e] = 0.0f;
        }
        for (int round = 0; round < most; round += X_DEPTH) {
#pragma unroll
            for (int s = 0; s < X_DEPTH; ++s) {
                const int chunk = round + s;
                if (chunk >= most) break;
                uint4 w[TM][2];
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    const uint32_t from = ring.data(at) + warp * CHUNK_BYTES + 16 * lane;
                    barrier_wait(ring.full(at), at.phase);
                    if (chunk < count) {
                        w[i][0] = load_shared(from);
                        w[i][1] = load_shared(from + CHUNK_BYTES / 2);
                    }
                    sync_warp();
                    if (lane == 0) barrier_arrive(ring.empty(at));
                    at.advance(ring.slots);
                }
                if (chunk < count) {
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        mma_16x8x16(sums[i][0], w[i][0].x, w[i][0].y, w[i][0].z, w[i][0].w, x[s].x, x[s].y);
                        mma_16x8x16(sums[i][0], w[i][1].x, w[i][1].y, w[i][1].z, w[i][1].w, x[s].z, x[s].w);
                    }
                    if (!RESIDENT && mine && chunk + X_DEPTH < count) {
                        x[s] = load_activation(x_begin + (chunk + X_DEPTH) * k_step);
                    }
                }
            }
        }
        float* const tile_sums = all_sums + buffer * warps * SUMS;
        put_sums<1, TM>(tile_sums, warp, lane, sums);
        if (!RESIDENT && count > X_DEPTH) load_x();  // from its start for the next unit, if there is one
        sync_some(threads);
        finish_tiles<EPILOGUE, 1, TM, MAX_WARPS>(p, tile_sums, warps, threads, 0, unit * TM, extra);
        if (BUFFERS == 2) {
            buffer ^= 1;
        } else {
            sync_some(threads);
        }
    }
    sync_warp();
    if (lane == 0) barrier_arrive(ring.empty(at));
    at.advance(ring.slots);
    sync_some(threads);  // all stores, and all reads of the sums, are behind
    if (after != nullptr && threadIdx.x == 0) arrive_for_all(after);
}

// LAST: the fourth product's epilogue; -1: there are three.
template <int LAST, int MAX_WARPS>
__device__ inline void chain_gemm(const ChainParams& p, float* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32 - 1;
    const ChainRing ring{shared, shared_address(shared), p.common.slots, warps * CHUNK_BYTES};
    float* const all_sums = shared + (CHAIN_BARRIER_BYTES + ring.slots * ring.slot_bytes) / 4;

    if (warp == warps && lane == 0) {
        for (int i = 0; i < ring.slots; ++i) {
            barrier_init(ring.full(Cursor{i}), 1);
            barrier_init(ring.empty(Cursor{i}), warps);
        }
        barrier_init_fence();
    }
    __syncthreads();

    Cursor at;
    if (warp == warps) {
        if (lane == 0) {
            copy_product(p.common, ring, at, warps, chain_tiles(0), true, p.count == 1);
            for (int i = 1; i < p.count; ++i) {
                copy_product(p.then[i - 1], ring, at, warps, chain_tiles(i), false, i + 1 == p.count);
            }
        }
        pdl_wait();
        return;
    }
    int32_t* const arrived = p.arrived;
    sum_product<ADD, false, chain_tiles(0), 16, true, MAX_WARPS>(p.common, ring, at, all_sums, nullptr, arrived);
    sum_product<GATE_UP, true, chain_tiles(1), 16, true, MAX_WARPS>(p.then[0], ring, at, all_sums, arrived, arrived + 1);
    sum_product<ADD, false, chain_tiles(2), 4, false, MAX_WARPS>(p.then[1], ring, at, all_sums, arrived + 1,
                                                                 LAST < 0 ? nullptr : arrived + 2);
    if (LAST >= 0) {
        sum_product<(LAST < 0 ? STORE : LAST), true, chain_tiles(3), 16, true, MAX_WARPS>(p.then[2], ring, at, all_sums,
                                                                                         arrived + 2, nullptr);
    }
    // Nobody waits any more where all have come to here: zeros for the next launch.
    if (threadIdx.x == 0 && atomic_add(arrived + 3, 1) == int(gridDim.x) - 1) {
        for (int i = 0; i < MAX_PRODUCTS; ++i) arrived[i] = 0;
    }
}

}  // namespace slipstream
