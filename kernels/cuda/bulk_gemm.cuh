// y = x W^T for up to 16 rows of x and a weight that lies in DRAM: the sum of skinny_gemm.cuh, weights by bulk copies.
//
// A CTA walks over tiles. One thread of its last warp copies their weights through a ring in shared memory, ahead of the
// other warps and across the borders of tiles; these each sum one part of K. A CTA needs at most half of an SM, so that
// the CTAs of the next kernel find room while this one runs: their rings fill before griddepcontrol.wait returns.
//
// The memory is to have work all the time, also from this kernel's last copy to the next one's first behind its wait:
// about 3 us, in which it could bring 100 KB for each SM. So the copying thread lets the next kernel start when it has
// `left` slots still to ask for (a kernel that starts earlier fills its ring at the cost of this one's, and has nothing
// to ask for when it counts), and while it waits for the kernel before it asks for `ahead` more slots than the ring holds,
// into the L2.
//
// A slot of the ring holds STEP chunks of each part, of TM tiles: a run of the packed weight as it lies in memory.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

constexpr int MAX_SLOTS = 15;
constexpr int BARRIER_BYTES = 256;  // in front of the ring: of each slot one "full" and one "empty"
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

// The weights of this CTA in order, a slot at a time.
template <int TM, int STEP>
struct Walk {
    const bf16* unit;  // its tiles
    int64_t next_unit;
    int first = 0, chunks, per_slot;
    __device__ inline Walk(const Params& p, int warps)
        : unit(p.weight + int64_t(blockIdx.x) * TM * (p.K / 32) * CHUNK),
          next_unit(int64_t(gridDim.x) * TM * (p.K / 32) * CHUNK),
          chunks(p.K / 32),
          per_slot(STEP * warps) {}
    __device__ inline int bytes() const { return min(per_slot, chunks - first) * CHUNK_BYTES; }  // of each tile
    __device__ inline const bf16* of_tile(int i) const { return unit + (int64_t(i) * chunks + first) * CHUNK; }
    __device__ inline void advance() {
        first += per_slot;
        if (first >= chunks) {
            first = 0;
            unit += next_unit;
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
            const int of_unit = (chunks + STEP * warps - 1) / (STEP * warps);
            const int slots = (units - blockIdx.x + gridDim.x - 1) / gridDim.x * of_unit, filled = min(p.slots, slots);
            const int start_next = max(filled, slots - p.left);
            Cursor at;
            Walk<TM, STEP> load(p, warps);
            const auto load_slot = [&] {
                barrier_wait(empty + 8 * at.slot, at.phase ^ 1);  // in the first turn every slot is empty
                barrier_expect(full + 8 * at.slot, TM * load.bytes());
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    bulk_load(ring + at.slot * slot_bytes + i * piece, load.of_tile(i), load.bytes(), full + 8 * at.slot,
                              policy);
                }
                at.advance(p.slots);
                load.advance();
            };
            for (int i = 0; i < filled; ++i) load_slot();

            Walk<TM, STEP> look = load;
            for (int i = filled; i < min(filled + p.ahead, slots); ++i) {
#pragma unroll
                for (int j = 0; j < TM; ++j) bulk_prefetch(look.of_tile(j), look.bytes(), policy);
                look.advance();
            }
            // The next kernel never starts before this: attention reads old keys before its own wait, so all before this
            // kernel must be done by then.
            pdl_wait();
            for (int i = filled; i < slots; ++i) {
                if (i == start_next) pdl_launch_dependents();
                load_slot();
            }
            if (slots == start_next) pdl_launch_dependents();
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
    Extra extra = load_first_extra<EPILOGUE, NT, TM>(p, 0, blockIdx.x * TM);
    float rstd[NT];
    if (NORM) {
#pragma unroll
        for (int j = 0; j < NT; ++j) rstd[j] = row_rstd<(NT == 1 ? 8 : 4)>(p, 8 * j + g, t);
        if (RESIDENT) {
            sync_some(threads);
#pragma unroll
            for (int u = 0; u < X_DEPTH; ++u) {
                if (u < count) {
                    const uint4 weight = all_scales[4 * (u * warps + warp) + t];
#pragma unroll
                    for (int j = 0; j < NT; ++j) x[u][j] = normed(x[u][j], rstd[j], weight);
                }
            }
            sync_some(threads);
        }
    }

    Cursor at;
    int buffer = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
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
        const int next = unit + gridDim.x;
        if (!RESIDENT && next < units && count > X_DEPTH) {  // x from its start for the next tile
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
        if (next < units) extra = load_first_extra<EPILOGUE, NT, TM>(p, 0, next * TM);
        // Two buffers: whoever writes this one again has passed the barrier of the tile between, behind all readers.
        if (BUFFERS == 2) {
            buffer ^= 1;
        } else if (next < units) {
            sync_some(threads);
        }
    }
}

}  // namespace slipstream
