// y = x W^T for more than 8 rows of x and a weight that lies in DRAM: the sum of skinny_gemm.cuh, x read once for 32 to
// 256 weight rows.
//
// First order_x writes x, the norm applied, in the order of the matrix unit's B operand: [group of columns (rows of x)]
// [chunk][column][32 k]. So what a step needs of x is one run, and comes like the weights: one thread copies both into a
// ring in shared memory. CTAs of a cluster take neighbouring units of weight rows in step; each reads a share of x and
// sends it to all of them.
//
// A slot of the ring holds a chunk of each part of `split` pairs of parts, of all tiles of the unit and of x. A warp sums
// two tiles for 8 NT columns, both parts of a pair side by side. Either the pairs are summed at once by as many warps, or
// (split = 1) one after the other, so that a unit can be high; the sums of pairs are added in order.
#pragma once
#include <bulk_gemm.cuh>
#include <order_rows.cuh>

namespace slipstream {

// kernels/cuda/wide_launch.py has the same struct. Clusters: m_groups for each of so many that walk over the units.
struct WideParams {
    Params common;
    bf16* x_ordered;  // [m_groups, K / 32, columns, 32]
    int32_t parts, split, columns;
    int32_t clustered;  // whether a cluster has several CTAs
};

template <bool NORM>
__device__ inline void order_x(const WideParams& given) {
    const int chunks = given.common.K / 32;
    const auto place = [&](int m, int t) {
        const int group = m / given.columns;
        return given.x_ordered + (int64_t(group) * chunks * given.columns + m - group * given.columns) * 32 + 8 * t;
    };
    order_rows<NORM>(given.common, given.common.m_groups * given.columns, place, [&](bf16* to, int chunk, const uint4& v) {
        store_16(to + int64_t(chunk) * given.columns * 32, v);
    });
}

// The slots of a CTA in order: of each unit its pairs of parts, `split` at a time, and of these their chunks.
struct Steps {
    int unit, pass = 0, step = 0;
    int walk, parts, width, passes, chunks;  // width: parts of a pass
    __device__ inline Steps(const WideParams& given, int first_unit, int next_unit)
        : unit(first_unit),
          walk(next_unit),
          parts(given.parts),
          width(2 * given.split),
          passes((given.parts + width - 1) / width),
          chunks(given.common.K / 32) {}
    __device__ inline int chunk() const { return step * parts + pass * width; }  // the first one
    __device__ inline int count() const { return min(min(width, parts - pass * width), chunks - chunk()); }
    __device__ inline int of_pass() const { return (chunks - pass * width + parts - 1) / parts; }
    __device__ inline void advance() {
        if (++step == of_pass()) {
            step = 0;
            if (++pass == passes) {
                pass = 0;
                unit += walk;
            }
        }
    }
};

// Adds a chunk of a part: two tiles (`next_tile` bytes apart) by NT tiles of x.
template <int NT>
__device__ inline void add_step(float (&sums)[2][NT][4], uint32_t weights, uint32_t next_tile, uint32_t x) {
    constexpr int AHEAD = 2;  // tiles of x in registers
    uint4 w[2][2], b[NT];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w[i][0] = load_shared(weights + i * next_tile);
        w[i][1] = load_shared(weights + i * next_tile + CHUNK_BYTES / 2);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) b[j] = load_shared(x + j * CHUNK_BYTES / 2);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            mma_16x8x16(sums[i][j], w[i][0].x, w[i][0].y, w[i][0].z, w[i][0].w, b[j].x, b[j].y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            mma_16x8x16(sums[i][j], w[i][1].x, w[i][1].y, w[i][1].z, w[i][1].w, b[j].z, b[j].w);
        }
        if (j + AHEAD < NT) b[j + AHEAD] = load_shared(x + (j + AHEAD) * CHUNK_BYTES / 2);
    }
}

template <int EPILOGUE, int NT, int GROUPS>
__device__ inline void wide_gemm(const WideParams& given, float* shared) {
    constexpr int COLUMNS = 8 * NT * GROUPS, X_CHUNK = 64 * COLUMNS, OUTPUTS = TILE_OUTPUTS<EPILOGUE>, BATCH = 4;
    const Params& p = given.common;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32 - 1, split = given.split;
    const int unit_tiles = 2 * (warps / (GROUPS * split)), stride = 16 * unit_tiles + 4;  // + 4: no bank conflicts
    const int rank = cluster_rank(), ctas = cluster_size();
    const int cluster = blockIdx.x / ctas, first = cluster / p.m_groups * ctas, group = cluster % p.m_groups;
    const int walk = gridDim.x / p.m_groups, units = (p.tiles + unit_tiles - 1) / unit_tiles;
    const int tile_bytes = 2 * split * CHUNK_BYTES, slot_bytes = unit_tiles * tile_bytes + 2 * split * X_CHUNK;

    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ring = full + BARRIER_BYTES;
    const uint32_t sums_at = ring + p.slots * slot_bytes;  // [split][COLUMNS][stride]
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, warps * ctas);
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // whoever reaches into another CTA waits until its barriers are there
    // Behind a QKV product attention reads old keys before its wait, so all before this kernel must be done by then.
    if (EPILOGUE != QKV) pdl_launch_dependents();

    if (warp == warps) {
        Steps load(given, first + rank, walk);
        const uint64_t policy = weight_policy(p.evict_first != 0), x_policy = weight_policy(false);
        const auto load_weights = [&](int slot) {
            const int tile = load.unit * unit_tiles, tiles = max(0, min(unit_tiles, p.tiles - tile));
            const int count = load.count();
            barrier_expect(full + 8 * slot, count * (tiles * CHUNK_BYTES + X_CHUNK));
            const bf16* from = p.weight + (int64_t(tile) * load.chunks + load.chunk()) * CHUNK;
            for (int i = 0; i < tiles; ++i, from += int64_t(load.chunks) * CHUNK) {
                bulk_load(ring + slot * slot_bytes + i * tile_bytes, from, count * CHUNK_BYTES, full + 8 * slot, policy);
            }
        };
        const bf16* const x_begin = given.x_ordered + int64_t(group) * load.chunks * (X_CHUNK / 2);
        const auto load_x = [&](int slot, const Steps& step) {
            const int bytes = step.count() * X_CHUNK / ctas;
            bulk_load_to_all(ring + slot * slot_bytes + unit_tiles * tile_bytes + rank * bytes,
                             x_begin + int64_t(step.chunk()) * (X_CHUNK / 2) + rank * (bytes / 2), bytes,
                             full + 8 * slot, x_policy, ctas);
        };
        Steps x = load;
        int filled = 0;
        if (lane == 0) {
            for (; filled < p.slots && load.unit - rank < units; ++filled, load.advance()) load_weights(filled);
        }
        sync_warp();
        cluster_wait();
        pdl_wait();  // nothing above reads what another kernel writes
        if (EPILOGUE == QKV) pdl_launch_dependents();
        if (lane == 0) {
            copies_see_memory();
            for (int i = 0; i < filled; ++i, x.advance()) load_x(i, x);
            Cursor at;
            for (at.phase = 1; load.unit - rank < units; load.advance()) {
                barrier_wait(empty + 8 * at.slot, at.phase ^ 1);
                load_weights(at.slot);
                load_x(at.slot, load);
                at.advance(p.slots);
            }
        }
        sync_warp();
        if (given.clustered) {  // no CTA ends while others may reach into it
            cluster_arrive();
            cluster_wait();
        }
        return;
    }

    cluster_wait();
    pdl_wait();
    const int threads = 32 * warps, pair = warp % split, columns = warp / split % GROUPS * 8 * NT;
    const int two_tiles = warp / (split * GROUPS) * 2, m0 = group * COLUMNS;
    const uint32_t weights_at = ring + two_tiles * tile_bytes + 2 * pair * CHUNK_BYTES + 16 * lane;
    const uint32_t x_at = ring + unit_tiles * tile_bytes + 2 * pair * X_CHUNK + columns * 64 + 16 * lane;
    Cursor at;
    for (int unit = first + rank; unit - rank < units; unit += walk) {
        const int tile = unit * unit_tiles, tiles = max(0, min(unit_tiles, p.tiles - tile));
        for (int pass = 0; pass * 2 * split < given.parts; ++pass) {
            float even[2][NT][4], odd[2][NT][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) even[i][j][e] = odd[i][j][e] = 0.0f;
                }
            }
            const int part = 2 * (pass * split + pair), chunks = p.K / 32;
            const bool even_there = part < given.parts && two_tiles < tiles, odd_there = part + 1 < given.parts;
            const int even_steps = even_there ? (chunks - part + given.parts - 1) / given.parts : 0;
            const int odd_steps = even_there && odd_there ? (chunks - part + given.parts - 2) / given.parts : 0;
            const int steps = (chunks - pass * 2 * split + given.parts - 1) / given.parts;
            for (int step = 0; step < steps; ++step) {
                const uint32_t slot = at.slot * slot_bytes;
                barrier_wait(full + 8 * at.slot, at.phase);
                if (step < even_steps) add_step<NT>(even, weights_at + slot, tile_bytes, x_at + slot);
                if (step < odd_steps) {
                    add_step<NT>(odd, weights_at + slot + CHUNK_BYTES, tile_bytes, x_at + slot + X_CHUNK);
                }
                sync_warp();
                if (lane < ctas) barrier_arrive_there(cluster_address(empty + 8 * at.slot, lane));
                at.advance(p.slots);
            }
            const int thread = opaque(threadIdx.x);
            const int put_column = columns + thread % 4 * 2, put_row = 16 * two_tiles + thread % 32 / 4;
            const uint32_t put_at = opaque(sums_at) + 4 * ((pair * COLUMNS + put_column) * stride + put_row);
            if (even_there) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const uint32_t to = put_at + 4 * ((8 * j + e % 2) * stride + 16 * i + 8 * (e / 2));
                            const float sum = odd_there ? even[i][j][e] + odd[i][j][e] : even[i][j][e];
                            store_shared(to, pass > 0 ? load_shared_float(to) + sum : sum);  // no one else's
                        }
                    }
                }
            }
        }
        sync_some(threads);
        const int rows = tiles * OUTPUTS, outputs = min(COLUMNS, p.M - m0) * rows;
        for (int index = threadIdx.x; index - int(threadIdx.x) < outputs; index += BATCH * threads) {
            Extra extra[BATCH];
            float low[BATCH] = {}, high[BATCH] = {};
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int i = index + b * threads, column = i / rows, row = i % rows;
                extra[b] = Extra{0, 0, 0};
                if (i < outputs) extra[b] = load_extra<EPILOGUE>(p, m0 + column, place_of<EPILOGUE>(p, tile, row));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int i = index + b * threads, column = i / rows, row = i % rows;
                const uint32_t from = sums_at + 4 * (column * stride + 16 * (row / OUTPUTS) + row % OUTPUTS);
                for (int v = 0; v < split && i < outputs; ++v) {
                    const float one = load_shared_float(from + 4 * v * COLUMNS * stride);
                    low[b] = v == 0 ? one : low[b] + one;
                    if (PAIRED<EPILOGUE>) {
                        const float two = load_shared_float(from + 4 * v * COLUMNS * stride + 32);
                        high[b] = v == 0 ? two : high[b] + two;
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int i = index + b * threads, column = i / rows, row = i % rows;
                if (i < outputs) {
                    finish<EPILOGUE>(p, m0 + column, place_of<EPILOGUE>(p, tile, row), low[b], high[b], extra[b]);
                }
            }
        }
        sync_some(threads);  // the sums are read
    }
    sync_warp();
    if (given.clustered) {
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace slipstream
