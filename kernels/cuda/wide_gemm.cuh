// y = x W^T for more than 8 rows of x and a weight that lies in DRAM: the sum of skinny_gemm.cuh, x read once for 64 to
// 224 weight rows.
//
// A cluster of CTAs takes a unit of tiles, each of its CTAs two parts of K, 2 r and 2 r + 1: their sum is a pair's.
// Pairs meet through the cluster's shared memory: each CTA adds and finishes some columns (rows of x). So x and the
// weight come to one CTA each, and there are CTAs enough though a unit is high.
//
// In a CTA one warp copies weights through a ring in shared memory, as in bulk_gemm.cuh; X_WARPS warps read x, apply
// the norm once and lay it into the same slot in the order of the matrix unit's B operand; each other warp sums one
// part of two tiles for 8 NT columns, GROUPS of such side by side. A slot holds one chunk of each part: 2 KB of the packed
// weight a tile, as it lies in memory.
#pragma once
#include <bulk_gemm.cuh>

namespace slipstream {

// kernels/cuda/wide_launch.py has the same struct. Clusters: m_groups for each of so many that walk over the units.
struct WideParams {
    Params common;
    int32_t parts;
};

constexpr int WIDE_HEADER_BYTES = 1024;  // barriers, then rstd of up to 128 columns
constexpr int RSTD_AT = 512;

// Chunks of a part of K; 0 for one that is not there.
__device__ inline int chunks_of_part(const Params& p, int parts, int part) {
    if (part >= parts) return 0;
    return p.chunks_per_part - ((p.chunks_per_part - 1) * parts + part < p.K / 32 ? 0 : 1);
}

// The sum of a slot's chunks, two tiles by NT tiles of x: a warp's part of a step.
template <int NT>
__device__ inline void add_step(float (&sums)[2][NT][4], uint32_t weights, uint32_t x) {
    constexpr int AHEAD = 2;  // tiles of x in registers
    uint4 w[2][2], b[NT];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w[i][0] = load_shared(weights + i * 2 * CHUNK_BYTES);
        w[i][1] = load_shared(weights + i * 2 * CHUNK_BYTES + CHUNK_BYTES / 2);
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

template <int EPILOGUE, bool NORM, int NT, int GROUPS, int X_WARPS, int MAX_WARPS>
__device__ inline void wide_gemm(const WideParams& given, float* shared) {
    constexpr int COLUMNS = 8 * NT * GROUPS, X_BYTES = 2 * COLUMNS * 64;
    constexpr int X_ROWS = COLUMNS / (4 * X_WARPS);                           // of a thread
    constexpr int X_AHEAD = X_ROWS <= 2 ? 4 : X_ROWS <= 4 ? 2 : 1;            // steps of which it holds x
    static_assert(X_ROWS * 4 * X_WARPS == COLUMNS, "whole rows of x for each thread");
    constexpr int STRIDE = 16 * (MAX_WARPS / GROUPS) + 4;  // of sums; + 4: no bank conflicts
    constexpr int BATCH = NT <= 2 ? 2 : 4, OUTPUTS = TILE_OUTPUTS<EPILOGUE>;
    const Params& p = given.common;

    // Behind a QKV product attention reads old keys before its wait, so all before this kernel must be done by then.
    if (EPILOGUE != QKV) pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32 - X_WARPS - 1;
    const int rank = cluster_rank(), pairs = cluster_size(), unit_tiles = warps / GROUPS;
    const int cluster = blockIdx.x / pairs, walk = gridDim.x / pairs / p.m_groups;  // clusters that share the units
    const int first_unit = cluster / p.m_groups, m0 = (cluster - first_unit * p.m_groups) * COLUMNS;
    const int chunks = p.K / 32, units = (p.tiles + unit_tiles - 1) / unit_tiles;
    const int even = 2 * rank, odd = even + 1;  // the parts here
    const int steps = chunks_of_part(p, given.parts, even), odd_steps = chunks_of_part(p, given.parts, odd);

    const uint32_t full = shared_address(shared), empty = full + 8 * MAX_SLOTS, ready = empty + 8 * MAX_SLOTS;
    const uint32_t done = ready + 8, normed_rows = ready + 16;
    const uint32_t rstd_at = full + RSTD_AT, ring = full + WIDE_HEADER_BYTES;
    const int weight_bytes = unit_tiles * 2 * CHUNK_BYTES, slot_bytes = weight_bytes + X_BYTES;
    const uint32_t sums_at = ring + p.slots * slot_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.slots; ++i) {
            barrier_init(full + 8 * i, 1 + X_WARPS);
            barrier_init(empty + 8 * i, warps);
        }
        barrier_init(ready, pairs);
        barrier_init(done, pairs);
        barrier_init(normed_rows, GROUPS * NT);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // whoever reaches into another CTA waits until its barriers are there

    if (warp == warps + X_WARPS) {
        if (lane == 0) {
            const uint64_t policy = weight_policy(p.evict_first != 0);
            Cursor at;
            for (int unit = first_unit; unit < units; unit += walk) {
                const int tiles = min(unit_tiles, p.tiles - unit * unit_tiles);
                const bf16* from = p.weight + (int64_t(unit) * unit_tiles * chunks + even) * CHUNK;
                for (int step = 0; step < steps; ++step, from += given.parts * CHUNK) {
                    const int bytes = step < odd_steps ? 2 * CHUNK_BYTES : CHUNK_BYTES;
                    barrier_wait(empty + 8 * at.slot, at.phase ^ 1);  // in the first turn every slot is empty
                    barrier_expect(full + 8 * at.slot, tiles * bytes);
                    for (int i = 0; i < tiles; ++i) {
                        bulk_load(ring + at.slot * slot_bytes + i * 2 * CHUNK_BYTES, from + int64_t(i) * chunks * CHUNK,
                                  bytes, full + 8 * at.slot, policy);
                    }
                    at.advance(p.slots);
                }
            }
        }
        sync_warp();
        cluster_wait();
        pdl_wait();
        return;
    }

    pdl_wait();  // nothing above reads what another kernel writes
    if (EPILOGUE == QKV) pdl_launch_dependents();

    if (warp >= warps) {
        // Eight threads a row and step: four for each chunk, each with the 16 bytes of one lane of the matrix unit.
        const int id = threadIdx.x - 32 * warps, chunk = id / 4 % 2, t = id % 4, first_row = id / 8;
        const int present = chunk == 0 ? steps : odd_steps;
        const int k0 = 32 * (even + chunk) + 8 * t, k_step = 32 * given.parts;
        const bf16* const x_begin = p.x + int64_t(m0 + first_row) * p.x_stride + k0;
        const int64_t x_rows = int64_t(4 * X_WARPS) * p.x_stride;
        const int total = first_unit < units ? ((units - 1 - first_unit) / walk + 1) * steps : 0;
        uint4 x[X_AHEAD][X_ROWS], scale[X_AHEAD] = {};
        int coming = 0;  // step of the next read
#pragma unroll
        for (int u = 0; u < X_AHEAD; ++u) {
#pragma unroll
            for (int i = 0; i < X_ROWS; ++i) x[u][i] = uint4{0, 0, 0, 0};  // rows that are not there
            if (u < total) {
                if (coming < present) {
                    if (NORM) scale[u] = load_activation(p.norm_weight + k0 + coming * k_step);
#pragma unroll
                    for (int i = 0; i < X_ROWS; ++i) {
                        if (m0 + first_row + 4 * X_WARPS * i < p.M) {
                            x[u][i] = load_activation(x_begin + i * x_rows + coming * k_step);
                        }
                    }
                }
                if (++coming == steps) coming = 0;
            }
        }
        sync_warp();
        cluster_wait();
        float rstd[X_ROWS] = {};
        if (NORM) {
            barrier_wait_cluster(normed_rows, 0);
#pragma unroll
            for (int i = 0; i < X_ROWS; ++i) rstd[i] = load_shared_float(rstd_at + 4 * (first_row + 4 * X_WARPS * i));
        }
        Cursor at;
        int step = 0;
        for (int round = 0; round < total; round += X_AHEAD) {
#pragma unroll
            for (int u = 0; u < X_AHEAD; ++u) {
                if (round + u >= total) break;
                barrier_wait(empty + 8 * at.slot, at.phase ^ 1);
                if (step < present) {
                    const uint32_t to = ring + at.slot * slot_bytes + weight_bytes + chunk * COLUMNS * 64 + 16 * t;
#pragma unroll
                    for (int i = 0; i < X_ROWS; ++i) {
                        const int row = first_row + 4 * X_WARPS * i;
                        // Of the odd part rows 2 i and 2 i + 1 change places: a row's eight threads meet no bank twice.
                        store_shared(to + 64 * (row ^ chunk), NORM ? normed(x[u][i], rstd[i], scale[u]) : x[u][i]);
                    }
                }
                sync_warp();
                if (lane == 0) barrier_arrive(full + 8 * at.slot);
                at.advance(p.slots);
                if (++step == steps) step = 0;
                if (round + u + X_AHEAD < total) {
                    if (coming < present) {
                        if (NORM) scale[u] = load_activation(p.norm_weight + k0 + coming * k_step);
#pragma unroll
                        for (int i = 0; i < X_ROWS; ++i) {
                            if (m0 + first_row + 4 * X_WARPS * i < p.M) {
                                x[u][i] = load_activation(x_begin + i * x_rows + coming * k_step);
                            }
                        }
                    }
                    if (++coming == steps) coming = 0;
                }
            }
        }
        return;
    }

    sync_warp();
    cluster_wait();
    const int threads = 32 * warps;
    if (NORM) {  // every row's norm once a cluster
        const int g = lane / 4, t = lane % 4;
        for (int block = rank + pairs * warp; block < GROUPS * NT; block += pairs * warps) {
            const float rstd = row_rstd<4>(p, m0 + 8 * block + g, t);
            const uint32_t at = rstd_at + 4 * (8 * block + g);
            for (int to = t; to < pairs; to += 4) store_cluster(cluster_address(at, to), rstd);
            sync_warp();
            if (lane < pairs) barrier_arrive_cluster(cluster_address(normed_rows, lane));
        }
    }
    const int part = warp % 2, columns = warp / 2 % GROUPS * 8 * NT, two_tiles = warp / 2 / GROUPS * 2;
    const int count = part == 0 ? steps : odd_steps;
    const uint32_t weights_at = ring + 2 * two_tiles * CHUNK_BYTES + part * CHUNK_BYTES + 16 * lane;
    const uint32_t x_at = ring + weight_bytes + part * COLUMNS * 64 + columns * 64 + 16 * (lane ^ 4 * part);

    Cursor at;
    uint32_t phase = 0;  // of `ready`
    for (int unit = first_unit; unit < units; unit += walk) {
        const int tile = unit * unit_tiles, tiles = min(unit_tiles, p.tiles - tile);
        float sums[2][NT][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
            }
        }
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * at.slot, at.phase);
            if (step < count && two_tiles < tiles) {
                add_step<NT>(sums, weights_at + at.slot * slot_bytes, x_at + at.slot * slot_bytes);
            }
            sync_warp();
            if (lane == 0) barrier_arrive(empty + 8 * at.slot);
            at.advance(p.slots);
        }

        const int thread = opaque(threadIdx.x);
        const int put_column = columns + thread % 4 * 2, put_row = 16 * two_tiles + thread % 32 / 4;
        const uint32_t put_at = opaque(sums_at) + 4 * (put_column * STRIDE + put_row);
        if (unit != first_unit) barrier_wait_cluster(done, phase ^ 1);  // all have read the last unit's sums
#pragma unroll
        for (int turn = 1; turn >= 0; --turn) {  // the odd part's sums, then even ones with these added
            if (part == turn && two_tiles < tiles) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const uint32_t to = put_at + 4 * ((8 * j + e % 2) * STRIDE + 16 * i + 8 * (e / 2));
                            float v = sums[i][j][e];
                            if (turn == 0 && odd_steps > 0) v += load_shared_float(to);
                            store_shared(to, v);
                        }
                    }
                }
            }
            sync_some(threads);
        }
        if (thread < pairs) barrier_arrive_cluster(cluster_address(ready, thread));

        const int rows = tiles * OUTPUTS, here = min(COLUMNS, p.M - m0);
        const int outputs = (here - rank + pairs - 1) / pairs * rows;  // columns rank, rank + pairs, ...
        bool waited = false;
        for (int first = thread; first - thread < outputs; first += BATCH * threads) {
            float low[BATCH] = {}, high[BATCH] = {};
            uint32_t from_own[BATCH];
            Extra extra[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int index = first + b * threads, column = rank + pairs * (index / rows);
                extra[b] = Extra{0, 0, 0};
                if (index < outputs) {
                    extra[b] = load_extra<EPILOGUE>(p, m0 + column, place_of<EPILOGUE>(p, tile, index % rows));
                }
            }
            if (!waited) barrier_wait_cluster(ready, phase);
            waited = true;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int index = first + b * threads, column = rank + pairs * (index / rows), row = index % rows;
                from_own[b] = sums_at + 4 * (column * STRIDE + 16 * (row / OUTPUTS) + row % OUTPUTS);
            }
            for (int v = 0; v < pairs; v += 2) {  // two of each sum in flight
                float one[2][BATCH], two[2][BATCH];
#pragma unroll
                for (int u = 0; u < 2; ++u) {
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) {
                        one[u][b] = two[u][b] = 0.0f;  // unset on some path, they would be held over the whole loop
                        if (v + u < pairs && first + b * threads < outputs) {
                            const uint32_t there = cluster_address(from_own[b], v + u);
                            one[u][b] = load_cluster(there);
                            if (PAIRED<EPILOGUE>) two[u][b] = load_cluster(there + 32);
                        }
                    }
                }
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    if (v + u < pairs) {
#pragma unroll
                        for (int b = 0; b < BATCH; ++b) {
                            low[b] = v + u == 0 ? one[u][b] : low[b] + one[u][b];
                            if (PAIRED<EPILOGUE>) high[b] = v + u == 0 ? two[u][b] : high[b] + two[u][b];
                        }
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int index = first + b * threads, column = rank + pairs * (index / rows);
                if (index < outputs) {
                    const Place place = place_of<EPILOGUE>(p, tile, index % rows);
                    finish<EPILOGUE>(p, m0 + column, place, low[b], high[b], extra[b]);
                }
            }
        }
        if (!waited) barrier_wait_cluster(ready, phase);
        sync_some(threads);
        if (thread < pairs) barrier_arrive_cluster(cluster_address(done, thread));
        phase ^= 1;
    }
    if (first_unit < units) barrier_wait_cluster(done, phase ^ 1);  // no other CTA reads here any more
}

}  // namespace slipstream
