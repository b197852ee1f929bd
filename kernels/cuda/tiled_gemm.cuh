// y = x W^T for prompts, a thousand rows of x and more: the sum of skinny_gemm.cuh, x read once for 64 weight rows and a
// weight once for 128 rows of x.
//
// order_x (wide_gemm.cuh) writes x, the norm applied, as the matrix unit takes it. A CTA takes 128 rows of x (columns)
// and four tiles of weight rows; a warp sums two tiles for 64 columns. Chunks come through a ring in shared memory,
// part after part of K: when a part is summed, it waits for its pair, and the pair is added to those before it. So all
// of K passes through registers, and two CTAs on an SM hide each other's beginning and end.
#pragma once
#include <skinny_gemm.cuh>
#include <wide_gemm.cuh>

namespace slipstream {

constexpr int TILED_COLUMNS = 128, TILED_TILES = 4, TILED_THREADS = 128;

// Chunks in the order in which they are summed.
struct PartSteps {
    int part = 0, chunk = 0;
    __device__ inline bool advance(int parts, int chunks) {  // whether a part is complete
        chunk += parts;
        if (chunk < chunks) return false;
        chunk = ++part;
        return true;
    }
};

template <int EPILOGUE>
__device__ inline void tiled_gemm(const WideParams& given, float* shared) {
    constexpr int NT = 8, TILES = TILED_TILES, X_CHUNK = 64 * TILED_COLUMNS, SLOT = TILES * CHUNK_BYTES + X_CHUNK;
    constexpr int STRIDE = 16 * TILES + 4, COUNT = 4;
    const Params& p = given.common;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = p.K / 32;
    const int unit = blockIdx.x / p.m_groups, group = blockIdx.x - unit * p.m_groups;
    const int tile = unit * TILES, tiles = min(TILES, p.tiles - tile);
    const uint32_t full = shared_address(shared), ring = full + BARRIER_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) barrier_init(full + 8 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // a cluster of one, as the copies of x want
    cluster_wait();
    if (EPILOGUE != QKV) pdl_launch_dependents();  // as in wide_gemm.cuh

    const uint64_t policy = weight_policy(false);
    const auto load_weights = [&](int slot, int chunk) {
        barrier_expect(full + 8 * slot, tiles * CHUNK_BYTES + X_CHUNK);
        for (int i = 0; i < tiles; ++i) {
            bulk_load(ring + slot * SLOT + i * CHUNK_BYTES, p.weight + (int64_t(tile + i) * chunks + chunk) * CHUNK,
                      CHUNK_BYTES, full + 8 * slot, policy);
        }
    };
    const bf16* const x = given.x_ordered + int64_t(group) * chunks * (X_CHUNK / 2);
    const auto load_x = [&](int slot, int chunk) {
        bulk_load_to_all(ring + slot * SLOT + TILES * CHUNK_BYTES, x + int64_t(chunk) * (X_CHUNK / 2), X_CHUNK,
                         full + 8 * slot, policy, 1);
    };
    PartSteps load;
    const int first = min(p.slots, chunks);
    if (threadIdx.x == 0) {
        PartSteps early;
        for (int i = 0; i < first; ++i, early.advance(given.parts, chunks)) load_weights(i, early.chunk);
    }
    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();
    if (threadIdx.x == 0) copies_see_memory();
    for (int i = 0; i < first; ++i, load.advance(given.parts, chunks)) {
        if (threadIdx.x == 0) load_x(i, load.chunk);
    }

    const int two_tiles = warp / 2 * 2, columns = warp % 2 * 8 * NT;
    const uint32_t weights_at = ring + two_tiles * CHUNK_BYTES + 16 * lane;
    const uint32_t x_at = ring + TILES * CHUNK_BYTES + columns * 64 + 16 * lane;
    float sums[2][NT][4] = {}, even[2][NT][4], total[2][NT][4];
    Cursor at;
    PartSteps step;
    int last_slot = 0;
    for (int n = 0; n < chunks; ++n) {
        barrier_wait(full + 8 * at.slot, at.phase);
        __syncthreads();  // the slot before is read
        if (n > 0 && n - 1 + p.slots < chunks) {
            if (threadIdx.x == 0) {
                load_weights(last_slot, load.chunk);
                load_x(last_slot, load.chunk);
            }
            load.advance(given.parts, chunks);
        }
        add_step<NT>(sums, weights_at + at.slot * SLOT, CHUNK_BYTES, x_at + at.slot * SLOT);
        last_slot = at.slot;
        at.advance(p.slots);
        const int part = step.part;
        if (!step.advance(given.parts, chunks)) continue;
        const bool odd = part % 2 != 0, waits = !odd && part + 1 < given.parts;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& sum = sums[i][j][e];
                    if (waits) {
                        even[i][j][e] = sum;
                    } else {
                        const float pair = odd ? even[i][j][e] + sum : sum;
                        total[i][j][e] = part < 2 ? pair : total[i][j][e] + pair;
                    }
                    sum = 0.0f;
                }
            }
        }
    }
    const int m0 = group * TILED_COLUMNS;
    Extra extras[COUNT];
    load_extras<EPILOGUE, TILED_COLUMNS / 8, TILES, COUNT>(p, m0, tile, 0, extras);
    __syncthreads();  // the ring is read; sums [column][STRIDE] take its place
    float* const out = shared + BARRIER_BYTES / 4;
    const int column = columns + lane % 4 * 2, row = 16 * two_tiles + lane / 4;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                out[(column + 8 * j + e % 2) * STRIDE + row + 16 * i + 8 * (e / 2)] = total[i][j][e];
            }
        }
    }
    __syncthreads();
    finish_rows<EPILOGUE, TILED_COLUMNS / 8, TILES, 1, COUNT>(p, out, 1, m0, tile, extras);
}

}  // namespace slipstream
