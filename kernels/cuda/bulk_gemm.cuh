// y = x W^T for up to 16 rows of x and a weight that lies in DRAM: the sum of skinny_gemm.cuh, weights by bulk copies.
//
// A CTA walks over units of TM tiles. One thread of its last warp copies their weights through a ring in shared memory,
// ahead of the other warps and across the borders of units; these each sum one part of K.
//
// One CTA stands on every SM, and kernels take turns with a large and a small ring (launch.py): a large one and a small
// one find room on an SM, so that the rings of the next kernel fill while this one runs; two large ones do not. Without
// that, two CTAs of one kernel share an SM that the kernel before had left, as many SMs have none, the kernel behind finds
// those, and so on: 44 of 132 SMs with two were seen, and 5.1 ms a chain in place of 3.8. Two small ones can still meet,
// where a CTA of the kernel before ends ahead of the last one's word that this kernel may start; `left` and units that go
// to whoever comes first keep that off, and no large kernel passes it on.
//
// Units: each CTA has `fixed` of its own; the others are handed out by a counter of the weight, so that CTAs end together.
// It is asked only behind griddepcontrol.wait, when the kernel before is done with it, and whoever asks last sets it to
// zero. So it is zero whenever no kernel runs; launches over one weight must be of one stream.
//
// The memory is to have work all the time, also from this kernel's last copy to the next one's first behind its wait:
// about 3 us, in which it could bring 100 KB for each SM. So the copying thread lets the next kernel start when it has
// `left` slots still to ask for (a kernel that starts earlier fills its ring at the cost of this one's, and has nothing
// to ask for when it counts).
//
// A slot of the ring holds STEP chunks of each part, of TM tiles: a run of the packed weight as it lies in memory.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

constexpr int MAX_SLOTS = 15;
// In front of the ring: of each slot one "full" and one "empty", then the unit that lies in it (-1: the end).
constexpr int UNITS_AT = 256, BARRIER_BYTES = 384;
constexpr int CHUNK_BYTES = 2 * CHUNK;

// A place in the ring; `phase` changes with every turn.
struct Cursor {
    int slot = 0;
    uint32_t phase = 0;
    __device__ inline void advance(int slots) {
        if (++slot == slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// RESIDENT: X_DEPTH chunks are all of a part, so that x is read (and normed) once, not once a tile. m_groups is 1.
template <int EPILOGUE, bool NORM, int NT, int TM, int STEP, int X_DEPTH, bool RESIDENT, int MAX_WARPS>
__device__ inline void bulk_gemm(const Params& p, float* shared) {
    static_assert(X_DEPTH % STEP == 0, "a slot of x must not depend on the round");
    constexpr int BUFFERS = RESIDENT ? 2 : 1;  // of sums
    constexpr int SUMS = 8 * NT * (16 * TM + 4);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32 - 1;
    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ring = full + BARRIER_BYTES;
    const int piece = STEP * warps * CHUNK_BYTES, slot_bytes = TM * piece;  // a tile's part of a slot
    float* const all_sums = shared + (BARRIER_BYTES + p.slots * slot_bytes) / 4;
    const int chunks = p.K / 32, units = p.tiles / TM;
    volatile int32_t* const unit_of = reinterpret_cast<int32_t*>(shared + UNITS_AT / 4);

    if (warp == warps && lane == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, warps);
        }
        barrier_init_fence();
    }
    __syncthreads();  // the barriers are there; before roles part: CUDA wants one __syncthreads that all threads reach

    if (warp == warps) {
        if (lane == 0) {
            const uint64_t policy = weight_policy(p.evict_first != 0);
            const int grid = gridDim.x, per_slot = STEP * warps, of_unit = (chunks + per_slot - 1) / per_slot;
            const bool handed_out = p.fixed * grid < units;
            const int own = min(p.fixed, (units - int(blockIdx.x) + grid - 1) / grid), filled = min(p.slots, own * of_unit);
            int unit = blockIdx.x, first = 0, next = -1, taken = 1;  // -1: not known yet
            bool waited = false, let_go = false;
            Cursor at;
            const auto take = [&] {
                if (!handed_out || taken < p.fixed) {
                    ++taken;
                    return unit + grid;
                }
                const int asked = atomic_add(p.counter, 1);
                if (asked == units - p.fixed * grid + grid - 1) *p.counter = 0;  // each CTA asks once too often
                return p.fixed * grid + asked;
            };
            const auto bytes_from = [&](int chunk) { return min(per_slot, chunks - chunk) * CHUNK_BYTES; };  // of a tile
            const auto weights = [&](int of, int i, int chunk) {
                return p.weight + ((int64_t(of) * TM + i) * chunks + chunk) * CHUNK;
            };
            const auto load_slot = [&] {
                // The next unit: in time, for the counter is far, and not too early.
                const bool may_ask = waited || !handed_out || taken < p.fixed;
                if (next < 0 && may_ask && first + 4 * per_slot >= chunks) next = take();
                barrier_wait(empty + 8 * at.slot, at.phase ^ 1);  // in the first turn every slot is empty
                unit_of[at.slot] = unit;
                barrier_expect(full + 8 * at.slot, TM * bytes_from(first));
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    bulk_load(ring + at.slot * slot_bytes + i * piece, weights(unit, i, first), bytes_from(first),
                              full + 8 * at.slot, policy);
                }
                at.advance(p.slots);
                first += per_slot;
                if (first >= chunks) {
                    first = 0;
                    unit = next;
                    next = -1;
                }
            };
            for (int i = 0; i < filled; ++i) load_slot();
            // The next kernel never starts before this: attention reads old keys before its own wait, so all before this
            // kernel must be done by then.
            pdl_wait();
            waited = true;
            if (unit < 0) unit = take();
            while (unit < units) {
                const bool last = unit + grid >= units;
                if (last && !let_go && (chunks - first + per_slot - 1) / per_slot <= p.left) {
                    pdl_launch_dependents();
                    let_go = true;
                }
                load_slot();
            }
            if (!let_go) pdl_launch_dependents();
            barrier_wait(empty + 8 * at.slot, at.phase ^ 1);
            unit_of[at.slot] = -1;
            barrier_arrive(full + 8 * at.slot);
        }
        pdl_wait();
        return;
    }

    const int g = lane / 4, t = lane % 4, threads = 32 * warps;
    const int most = p.chunks_per_part, count = most - ((most - 1) * warps + warp < chunks ? 0 : 1);
    const int k0 = 32 * warp + 8 * t, k_step = 32 * warps;
    uint4* const all_scales = reinterpret_cast<uint4*>(all_sums);  // RESIDENT: the norm's weight, before there are sums
    if (NORM && RESIDENT) {
        for (int i = threadIdx.x; i < p.K / 8; i += threads) all_scales[i] = load_activation(p.norm_weight + 8 * i);
    }
    uint4 scale[X_DEPTH];
    if (NORM && !RESIDENT) {
        // Else what is read of it on the way comes from the memory each time, behind the copies of all rings.
        for (int i = threadIdx.x; i < p.K / 64; i += threads) prefetch(p.norm_weight + 64 * i);
#pragma unroll
        for (int u = 0; u < X_DEPTH; ++u) {
            if (u < count) scale[u] = load_activation(p.norm_weight + k0 + u * k_step);
        }
    }

    pdl_wait();  // nothing above reads what another kernel writes

    const bf16* const x_begin = p.x + int64_t(g) * p.x_stride + k0;
    const int64_t x_step = 8 * p.x_stride;
    uint4 x[X_DEPTH][NT];
#pragma unroll
    for (int u = 0; u < X_DEPTH; ++u) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            x[u][j] = uint4{0, 0, 0, 0};  // rows that are not there
            if (u < count && 8 * j + g < p.M) x[u][j] = load_activation(x_begin + j * x_step + u * k_step);
        }
    }
    float rstd[NT];
    if (NORM) {
        // Sums take 1280 bytes for each part; there is room behind a norm's weight of at most 1024 for pieces of 256.
        static_assert(!RESIDENT || (NT == 1 && TM == 1 && X_DEPTH == 16), "no room for pieces of sums");
        const int room = RESIDENT ? p.M * p.K / 64 : warps * SUMS;  // for pieces
        const bool together = p.sumsq_in != nullptr && p.num_sumsq % 4 == 0 && p.M * p.num_sumsq / 4 <= room;
        float* const pieces = all_sums + (RESIDENT ? p.K / 2 : 0);
        if (together) put_pieces(p, pieces, threads);
        if (RESIDENT || together) sync_some(threads);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            rstd[j] = together ? rstd_of_pieces(p, pieces, 8 * j + g, t) : row_rstd<(NT == 1 ? 8 : 4)>(p, 8 * j + g, t);
        }
        if (RESIDENT) {
#pragma unroll
            for (int u = 0; u < X_DEPTH; ++u) {
                if (u < count) {
                    const uint4 weight = all_scales[4 * (u * warps + warp) + t];
#pragma unroll
                    for (int j = 0; j < NT; ++j) x[u][j] = normed(x[u][j], rstd[j], weight);
                }
            }
        }
        if (RESIDENT || together) sync_some(threads);
    }

    Cursor at;
    int buffer = 0;
    while (true) {
        barrier_wait(full + 8 * at.slot, at.phase);
        const int unit = unit_of[at.slot];
        if (unit < 0) break;
        const Extra extra = load_first_extra<EPILOGUE, NT, TM>(p, 0, unit * TM);
        float sums[TM][NT][4];
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
            }
        }
        for (int round = 0; round < most; round += X_DEPTH) {
#pragma unroll
            for (int s = 0; s < X_DEPTH; s += STEP) {
                if (round + s >= most) break;
                const uint32_t from = ring + at.slot * slot_bytes + warp * CHUNK_BYTES + 16 * lane;
                barrier_wait(full + 8 * at.slot, at.phase);
                uint4 w[STEP][TM][2];
#pragma unroll
                for (int c = 0; c < STEP; ++c) {
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        if (round + s + c < count) {
                            const uint32_t tile = from + i * piece + c * warps * CHUNK_BYTES;
                            w[c][i][0] = load_shared(tile);
                            w[c][i][1] = load_shared(tile + CHUNK_BYTES / 2);
                        }
                    }
                }
                sync_warp();
                if (lane == 0) barrier_arrive(empty + 8 * at.slot);
                at.advance(p.slots);
#pragma unroll
                for (int c = 0; c < STEP; ++c) {
                    const int u = s + c, chunk = round + u;
                    if (chunk < count) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            const uint4 b = NORM && !RESIDENT ? normed(x[u][j], rstd[j], scale[u]) : x[u][j];
#pragma unroll
                            for (int i = 0; i < TM; ++i) {
                                const uint4 low = w[c][i][0], high = w[c][i][1];
                                mma_16x8x16(sums[i][j], low.x, low.y, low.z, low.w, b.x, b.y);
                                mma_16x8x16(sums[i][j], high.x, high.y, high.z, high.w, b.z, b.w);
                            }
                        }
                        if (!RESIDENT && chunk + X_DEPTH < count) {
                            const int k = (chunk + X_DEPTH) * k_step;
                            if (NORM) scale[u] = load_activation(p.norm_weight + k0 + k);
#pragma unroll
                            for (int j = 0; j < NT; ++j) {
                                if (8 * j + g < p.M) x[u][j] = load_activation(x_begin + j * x_step + k);
                            }
                        }
                    }
                }
            }
        }
        float* const tile_sums = all_sums + buffer * warps * SUMS;
        put_sums<NT, TM>(tile_sums, warp, lane, sums);
        if (!RESIDENT && count > X_DEPTH) {  // x from its start for the next unit, if there is one
#pragma unroll
            for (int u = 0; u < X_DEPTH; ++u) {
                if (NORM) scale[u] = load_activation(p.norm_weight + k0 + u * k_step);
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    if (8 * j + g < p.M) x[u][j] = load_activation(x_begin + j * x_step + u * k_step);
                }
            }
        }
        sync_some(threads);
        finish_tiles<EPILOGUE, NT, TM, MAX_WARPS>(p, tile_sums, warps, threads, 0, unit * TM, extra);
        // Two buffers: whoever writes this one again has passed the barrier of the tile between, behind all readers.
        if (BUFFERS == 2) {
            buffer ^= 1;
        } else {
            sync_some(threads);
        }
    }
}

}  // namespace slipstream
