// y = x W^T over INT4 weights for up to 8 rows of x: the sum of int4_parts.cuh, weights by bulk copies.
//
// A CTA walks over blocks; each of its warps sums one part of K and has a ring of its own in shared memory, which it
// fills itself: nobody else waits for it, but at the end of a block. A slot holds `step` quads and their scales. A CTA
// needs at most half of an SM, so that the CTAs of the next kernel are there while this one runs: their rings fill
// before griddepcontrol.wait returns, and the memory does not rest between two kernels.
#pragma once
#include <int4_parts.cuh>

namespace slipstream {

// Which rows of x a thread holds. RESIDENT: all of a part, through the norm. STREAM: X_QUADS quads, the norm at each use.
enum Rows { RESIDENT = 0, STREAM = 1 };

constexpr int QUAD_BYTES = 2048;

// A warp's ring, and which quads of its part come into it next, block by block.
template <int GROUP>
struct WarpRing {
    static constexpr int SCALE_BYTES = 8192 / GROUP;  // of a quad
    const Int4Params& all;
    const int quads, first_quad, count, blocks;  // quads of a row, of this warp's part; blocks
    const uint32_t full, ring;                   // in shared memory
    const uint64_t policy;
    int block, quad, slot = 0;  // what is asked for next; the slot that is read next
    uint32_t phase = 0;

    // Barriers of all warps, and behind them the rings.
    __device__ inline WarpRing(const Int4Params& all, float* shared, int part, int first_block)
        : all(all),
          quads(all.common.K / 128),
          first_quad(part * (all.common.chunks_per_part / 4)),
          count(max(0, min(all.common.chunks_per_part / 4, quads - first_quad))),
          blocks(all.common.tiles / BLOCK_TILES),
          full(shared_address(shared) + 8 * int(threadIdx.x / 32) * all.common.slots),
          ring(shared_address(shared) + (int(blockDim.x) / 4 * all.common.slots + 127) / 128 * 128 +
               int(threadIdx.x / 32) * all.common.slots * slot_bytes()),
          policy(weight_policy(all.common.evict_first != 0)),
          block(count > 0 ? first_block : blocks),
          quad(0) {
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < all.common.slots; ++i) barrier_init(full + 8 * i, 1);
            barrier_init_fence();
        }
        sync_warp();
        for (int i = 0; i < all.common.slots; ++i) fill(i);
        prefetch();
    }

    __device__ inline int slot_bytes() const { return all.step * (QUAD_BYTES + SCALE_BYTES); }
    __device__ inline bool all_asked_for() const { return block >= blocks; }

    // The next quads into a slot that all lanes have read.
    __device__ inline void fill(int to_slot) {
        if (block >= blocks) return;
        const int64_t from = int64_t(block) * quads + first_quad + quad;
        const int n = advance(block, quad);
        if (threadIdx.x % 32 == 0) {
            const uint32_t barrier = full + 8 * to_slot, to = ring + to_slot * slot_bytes();
            barrier_expect(barrier, n * (QUAD_BYTES + SCALE_BYTES));
            bulk_load(to, all.common.weight + from * QUAD, n * QUAD_BYTES, barrier, policy);
            bulk_load(to + all.step * QUAD_BYTES, all.scales + from * (SCALE_BYTES / 2), n * SCALE_BYTES, barrier, policy);
        }
    }

    // Steps over at most `step` quads; how many.
    __device__ inline int advance(int& at_block, int& at_quad) const {
        const int n = min(all.step, count - at_quad);
        at_quad += n;
        if (at_quad == count) {
            at_quad = 0;
            at_block += gridDim.x;
        }
        return n;
    }

    __device__ inline void prefetch() const {
        if (threadIdx.x % 32 != 0) return;
        for (int i = 0, at_block = block, at_quad = quad; i < all.ahead && at_block < blocks; i += all.step) {
            const int64_t from = int64_t(at_block) * quads + first_quad + at_quad;
            bulk_prefetch(all.common.weight + from * QUAD, advance(at_block, at_quad) * QUAD_BYTES, policy);
        }
    }

    // A quad of a block, in order: its products with the rows that rows_of(u, b) gives of chunk u, added to `sums`.
    template <int NT, class RowsOf>
    __device__ inline void multiply(int at_quad, const RowsOf& rows_of, float (&sums)[2][NT][4]) {
        const int lane = threadIdx.x % 32, place = at_quad & (all.step - 1);
        if (place == 0) barrier_wait(full + 8 * slot, phase);
        const uint32_t at = ring + slot * slot_bytes();
        const uint32_t words_at = at + place * QUAD_BYTES + 16 * lane;
        const uint32_t scales_at = at + all.step * QUAD_BYTES + place * SCALE_BYTES + 8 * (lane / 4);
        uint4 words = load_shared(words_at);
        uint2 scales = load_shared_8(scales_at);
        float partial[2][NT][4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint4 w = words;
            const uint2 by = scales;
            if (u < 3) words = load_shared(words_at + (u + 1) * QUAD_BYTES / 4);
            if (u < 3 && GROUP == 32) scales = load_shared_8(scales_at + 64 * (u + 1));
            uint4 b[NT];
            rows_of(u, b);
            multiply_chunk(w, b, GROUP == 32 || u == 0, partial);
            if (GROUP == 32 || u == 3) add_scaled(by, partial, sums);
        }
        if (place == all.step - 1 || at_quad == count - 1) {
            sync_warp();  // all lanes have read the slot
            fill(slot);
            if (++slot == all.common.slots) {
                slot = 0;
                phase ^= 1;
            }
        }
    }
};

// Lets the next kernel start, once; attention, behind q, k and v, reads older keys before it waits, so there not before
// this kernel has waited: all before it are done then.
template <int EPILOGUE, int GROUP>
__device__ inline void trigger_early(const WarpRing<GROUP>& ring, bool waited) {
    if (EPILOGUE == QKV && !waited) return;
    if (ring.all.trigger == AT_START || (ring.all.trigger == AT_LAST_COPY && ring.all_asked_for())) {
        pdl_launch_dependents();
    }
}

template <int EPILOGUE, bool NORM, int GROUP, int NT, int X_QUADS, int ROWS>
__device__ inline void int4_ring(const Int4Params& all, float* shared) {
    static_assert(GROUP == 32 || GROUP == 128, "a group is a chunk or a quad");
    const Params& p = all.common;
    if (EPILOGUE != QKV && all.trigger == AT_START) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4, columns = p.M;
    WarpRing<GROUP> weights(all, shared, warp, blockIdx.x);
    const int first_quad = weights.first_quad, count = weights.count;
    trigger_early<EPILOGUE>(weights, false);

    // The norm's weight of this warp's part.
    bf16* const beside = reinterpret_cast<bf16*>(shared + all.x_at);
    bf16* const scale_at = beside + first_quad * 128 + 8 * t;
    if (NORM) {
        for (int i = lane; i < 16 * count; i += 32) {
            store_shared(beside + first_quad * 128 + 8 * i, load_activation(p.norm_weight + first_quad * 128 + 8 * i));
        }
        sync_warp();
    }

    pdl_wait();  // nothing above reads what another kernel writes
    trigger_early<EPILOGUE>(weights, true);

    const bf16* const x_begin = p.x + int64_t(g) * p.x_stride + first_quad * 128 + 8 * t;
    const int x_step = 8 * int(p.x_stride);
    uint4 x[X_QUADS][4][NT];
    float rstd[NT];
    const auto load_x = [&](uint4(&to)[4][NT], int quad) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                if (8 * j + g < p.M) to[u][j] = load_activation(x_begin + j * x_step + 128 * quad + 32 * u);
            }
        }
    };
#pragma unroll
    for (int d = 0; d < X_QUADS; ++d) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
#pragma unroll
            for (int j = 0; j < NT; ++j) x[d][u][j] = uint4{0, 0, 0, 0};  // rows that are not there
        }
        if (d < count) load_x(x[d], d);
    }
    if (NORM) {
#pragma unroll
        for (int r = 0; r < 8 * NT; r += BATCH) {
            if (r < p.M) {
                float values[BATCH];
                warp_rstd(p, r, p.M - r, lane, values);
#pragma unroll
                for (int a = 0; a < BATCH; ++a) {
                    if (g == r % 8 + a) rstd[r / 8] = values[a];
                }
            }
        }
    }
    if (NORM && ROWS == RESIDENT) {
#pragma unroll
        for (int d = 0; d < X_QUADS; ++d) {
            if (d < count) {
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    const uint4 scale = load_shared(scale_at + 128 * d + 32 * u);
#pragma unroll
                    for (int j = 0; j < NT; ++j) x[d][u][j] = normed(x[d][u][j], rstd[j], scale);
                }
            }
        }
    }

    int turn = 0;
    for (int block = blockIdx.x; block < weights.blocks; block += gridDim.x, turn ^= 1) {
        const bool last = block + int(gridDim.x) >= weights.blocks;
        const Extra first_extra = first_extra_of<EPILOGUE>(p, 0, columns, block);
        float sums[2][NT][4];
        clear(sums);
        for (int round = 0; round < count; round += X_QUADS) {
#pragma unroll
            for (int d = 0; d < X_QUADS; ++d) {
                const int quad = round + d;
                if (quad < count) {
                    const auto rows_of = [&](int u, uint4(&b)[NT]) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            const bool at_use = NORM && ROWS == STREAM;
                            b[j] = at_use ? normed(x[d][u][j], rstd[j], load_shared(scale_at + 128 * quad + 32 * u))
                                          : x[d][u][j];
                        }
                    };
                    weights.multiply(quad, rows_of, sums);
                    // What takes these rows' place: a later quad, or for the next block an early one.
                    if (ROWS == STREAM && quad + X_QUADS < count) load_x(x[d], quad + X_QUADS);
                    if (all.trigger == AT_LAST_COPY) trigger_early<EPILOGUE>(weights, true);
                }
            }
        }
        if (ROWS == STREAM && count > X_QUADS && !last) {
#pragma unroll
            for (int d = 0; d < X_QUADS; ++d) {
                if (d < count) load_x(x[d], d);
            }
        }
        if (all.trigger == AT_END && last) pdl_launch_dependents();
        // Two places in turn: whoever writes one again has passed the barrier of the block between, behind all readers.
        float* const sums_at = shared + all.sums_at + turn * warps * columns * SUM_STRIDE;
        put_part(sums_at + warp * columns * SUM_STRIDE, columns, lane, sums);
        __syncthreads();
        finish_block<EPILOGUE>(p, sums_at, warps, 0, columns, block, first_extra);
    }
}

}  // namespace slipstream
