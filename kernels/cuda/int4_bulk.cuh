// y = x W^T over INT4 weights for up to 16 rows of x: the sum of int4_parts.cuh, weights by bulk copies.
//
// A CTA walks over blocks; its warps, each with one part of K, read weights from a ring in shared memory that is filled
// ahead of them and across the borders of blocks. A slot of the ring is a quad of each part, and their scales: two runs of
// memory, 16 KB and up to 2. The warp that reads a slot last fills it again: a warp more, for copies alone, would leave
// the others fewer registers than rows of x need, and nobody waits for a warp but for the weights and at a block's end.
//
// As in bulk_gemm.cuh a CTA needs at most half of an SM, so that the rings of the next kernel fill while this one runs,
// and `left` and `ahead` say how one kernel hands the memory to the next.
#pragma once
#include <int4_parts.cuh>

namespace slipstream {

constexpr int MAX_SLOTS = 20;
constexpr int BARRIER_BYTES = 256;  // in front of the ring: of each slot a barrier, and how many warps have read it
constexpr int QUAD_BYTES = 2048;

// The ring, as each warp sees it. Slots are numbered over all blocks of the CTA.
template <int GROUP>
struct QuadRing {
    static constexpr int SCALE_BYTES = 8192 / GROUP;  // of a quad
    const Int4Params& all;
    const int first_block, step;         // the CTA's first block, and from one to the next
    const uint32_t full, readers, ring;  // in shared memory
    int slots;                           // of all blocks
    int asked;                           // for so many of them
    int place = 0;                       // in the ring, of the slot that is read
    uint32_t phase = 0;

    __device__ inline QuadRing(const Int4Params& all, float* shared, int first_block, int step)
        : all(all),
          first_block(first_block),
          step(step),
          full(opaque(shared_address(shared))),
          readers(full + 8 * MAX_SLOTS),
          ring(full + BARRIER_BYTES),
          slots((all.common.tiles / BLOCK_TILES - first_block + step - 1) / step * all.slots_of_block),
          asked(min(all.common.slots, slots)) {}

    __device__ inline int warps() const { return blockDim.x / 32; }
    __device__ inline int quads() const { return all.common.K / 128; }  // of a row
    __device__ inline int slot_bytes() const { return warps() * (QUAD_BYTES + SCALE_BYTES); }

    // By one thread, before all others read: fills the ring and asks for what is to be in the L2.
    __device__ inline void begin() const {
        for (int i = 0; i < all.common.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            store_shared(readers + 4 * i, 0.0f);
        }
        barrier_init_fence();
        for (int i = 0; i < asked; ++i) fill(i, i);
        const uint64_t policy = weight_policy(all.common.evict_first != 0);
        for (int i = asked; i < min(asked + all.common.ahead, slots); ++i) {
            const Run run = run_of(i);
            bulk_prefetch(all.common.weight + run.from * QUAD, run.quads * QUAD_BYTES, policy);
        }
    }

    // Quads of a slot, `from` of all in the weight on.
    struct Run {
        int64_t from;
        int quads;
    };
    __device__ inline Run run_of(int i) const {
        const int turn = multiply_high(2 * i, all.inverse_slots), first = (i - turn * all.slots_of_block) * warps();
        return Run{int64_t(first_block + turn * step) * quads() + first, min(warps(), quads() - first)};
    }
    __device__ inline void fill(int i, int to_place) const {
        const Run run = run_of(i);
        const uint64_t policy = weight_policy(all.common.evict_first != 0);
        const uint32_t barrier = full + 8 * to_place, to = ring + to_place * slot_bytes();
        barrier_expect(barrier, run.quads * (QUAD_BYTES + SCALE_BYTES));
        bulk_load(to, all.common.weight + run.from * QUAD, run.quads * QUAD_BYTES, barrier, policy);
        bulk_load(to + warps() * QUAD_BYTES, all.scales + run.from * (SCALE_BYTES / 2), run.quads * SCALE_BYTES, barrier,
                  policy);
    }

    __device__ inline void wait() const { barrier_wait(full + 8 * place, phase); }
    // This warp has read its slot; whether it is the last one (in lane 0).
    __device__ inline bool read() const {
        sync_warp();
        return threadIdx.x % 32 == 0 && increment_shared(readers + 4 * place, warps() - 1) == warps() - 1;
    }
    // To the next slot; the last warp fills the one that it leaves.
    __device__ inline void next(bool last_reader) {
        if (asked < slots) {
            if (last_reader) {
                fill(asked, place);
                // Never before the wait: attention reads old keys before its own, so all before this must be done.
                if (asked == slots - all.common.left) pdl_launch_dependents();
            }
            ++asked;
        }
        if (++place == all.common.slots) {
            place = 0;
            phase ^= 1;
        }
    }
};

// A quad in the ring: its products with the rows that rows_of(u, b) gives of chunk u, added to `sums`; read() is called
// when this lane has read it.
template <int GROUP, int NT, class RowsOf, class Read>
__device__ inline void multiply_quad(uint32_t words_at, uint32_t scales_at, const RowsOf& rows_of, const Read& read,
                                     float (&sums)[2][NT][4]) {
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
        if (u == 3) read();
        if (GROUP == 32 || u == 3) add_scaled(by, partial, sums);
    }
}

// RESIDENT: X_QUADS are all of a part, so that x is read (and normed) once, not once a block; else each use is normed.
template <int EPILOGUE, bool NORM, int GROUP, int NT, int X_QUADS, bool RESIDENT>
__device__ inline void int4_bulk(const Int4Params& all, float* shared) {
    static_assert(GROUP == 32 || GROUP == 128, "a group is a chunk or a quad");
    const Params& p = all.common;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int blocks = p.tiles / BLOCK_TILES;
    const int first_block = blockIdx.x / p.m_groups, step = gridDim.x / p.m_groups;
    const int m0 = (blockIdx.x - first_block * p.m_groups) * 8 * NT, columns = min(8 * NT, p.M - m0);
    QuadRing<GROUP> weights(all, shared, first_block, step);
    if (threadIdx.x == 0) weights.begin();

    const int g = lane / 4, t = lane % 4, count = (p.K / 128 - warp + warps - 1) / warps;  // of this warp's part
    const int most = all.slots_of_block, k0 = 128 * warp + 8 * t, k_step = 128 * warps;
    bf16* const norm_weight = reinterpret_cast<bf16*>(shared + all.x_at);
    if (NORM) {  // each warp for itself
        for (int i = lane; i < 16 * count; i += 32) {
            const int k = piece_at(i, warp, warps);
            store_shared(norm_weight + k, load_activation(p.norm_weight + k));
        }
    }
    __syncthreads();  // barriers and the norm's weight are there

    pdl_wait();  // nothing above reads what another kernel writes
    if (threadIdx.x == 0 && weights.slots - weights.asked <= p.left) pdl_launch_dependents();

    const bf16* const x_begin = p.x + int64_t(m0 + g) * p.x_stride + k0;
    const int x_step = 8 * int(p.x_stride);
    uint4 x[X_QUADS][4][NT];
    const auto load_x = [&](uint4(&to)[4][NT], int quad) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                if (8 * j + g < columns) to[u][j] = load_activation(x_begin + j * x_step + quad * k_step + 32 * u);
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
    Extra first_extra = first_extra_of<EPILOGUE>(p, m0, columns, first_block);
    float rstd[NT];
    if (NORM) {
#pragma unroll
        for (int r = 0; r < 8 * NT; r += BATCH) {
            if (r < columns) {
                float values[BATCH];
                warp_rstd(p, m0 + r, columns - r, lane, values);
#pragma unroll
                for (int a = 0; a < BATCH; ++a) {
                    if (g == r % 8 + a) rstd[r / 8] = values[a];
                }
            }
        }
    }
    if (NORM && RESIDENT) {
#pragma unroll
        for (int d = 0; d < X_QUADS; ++d) {
            if (d < count) {
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    const uint4 scale = load_shared(norm_weight + k0 + d * k_step + 32 * u);
#pragma unroll
                    for (int j = 0; j < NT; ++j) x[d][u][j] = normed(x[d][u][j], rstd[j], scale);
                }
            }
        }
    }

    const uint32_t words = opaque(weights.ring + warp * QUAD_BYTES + 16 * lane);
    const uint32_t scales = opaque(weights.ring + warps * QUAD_BYTES + warp * weights.SCALE_BYTES + 8 * g);
    int turn = 0;
    for (int block = first_block; block < blocks; block += step, turn ^= 1) {
        const bool last = block + step >= blocks;
        float sums[2][NT][4];
        clear(sums);
        for (int round = 0; round < most; round += X_QUADS) {
#pragma unroll
            for (int d = 0; d < X_QUADS; ++d) {
                const int quad = round + d;
                if (quad >= most) break;
                bool last_reader = false;
                const auto read = [&] { last_reader = weights.read(); };
                weights.wait();
                if (quad < count) {
                    const auto rows_of = [&](int u, uint4(&b)[NT]) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            b[j] = NORM && !RESIDENT
                                       ? normed(x[d][u][j], rstd[j], load_shared(norm_weight + k0 + quad * k_step + 32 * u))
                                       : x[d][u][j];
                        }
                    };
                    const int offset = weights.place * weights.slot_bytes();
                    multiply_quad<GROUP>(words + offset, scales + offset, rows_of, read, sums);
                    // What takes these rows' place: a later quad, or for the next block an early one.
                    if (!RESIDENT && quad + X_QUADS < count) load_x(x[d], quad + X_QUADS);
                } else {
                    read();
                }
                weights.next(last_reader);
            }
        }
        if (!RESIDENT && count > X_QUADS && !last) {
#pragma unroll
            for (int d = 0; d < X_QUADS; ++d) load_x(x[d], d);
        }
        // Two places in turn: whoever writes one again has passed the barrier of the block between, behind all readers.
        float* const sums_at = shared + all.sums_at + turn * warps * columns * SUM_STRIDE;
        put_part(sums_at + warp * columns * SUM_STRIDE, columns, lane, sums);
        __syncthreads();
        finish_block<EPILOGUE>(p, sums_at, warps, blockDim.x, m0, columns, block, first_extra);
        if (!last) first_extra = first_extra_of<EPILOGUE>(p, m0, columns, block + step);
    }
}

}  // namespace slipstream
