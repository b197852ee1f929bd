// y = x W^T over INT4 weights for 9 to 16 rows of x: the sum of int4_parts.cuh, weights by bulk copies.
//
// So many rows are too much for each SM to hold or to read again for each block. A cluster of eight CTAs divides K: each
// holds rows of x for its one part, in shared memory. Its warps take a block each, eight at a time, and hand their sums
// to that CTA of the cluster which finishes the block.
#pragma once
#include <int4_ring.cuh>

namespace slipstream {

template <int EPILOGUE, bool NORM, int GROUP, int NT>
__device__ inline void int4_cluster(const Int4Params& all, float* shared) {
    const Params& p = all.common;
    if (EPILOGUE != QKV && all.trigger == AT_START) pdl_launch_dependents();
    cluster_arrive();  // before anybody writes to another CTA, all must be there
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank();
    const int g = lane / 4, t = lane % 4, columns = p.M, first_block = blockIdx.x - rank;
    WarpRing<GROUP> weights(all, shared, rank, first_block + warp);
    const int k_begin = 128 * weights.first_quad, stride = all.staged_stride;
    const int parts = (weights.quads - 1) / (p.chunks_per_part / 4) + 1;
    trigger_early<EPILOGUE>(weights, false);

    pdl_wait();  // nothing above reads what another kernel writes
    trigger_early<EPILOGUE>(weights, true);

    bf16* const rows = reinterpret_cast<bf16*>(shared + all.x_at);
    const int each = (p.M + MAX_PARTS - 1) / MAX_PARTS, first_row = warp * each;
    stage<NORM>(p, first_row, min(each, p.M - first_row), k_begin, 16 * weights.count, lane,
                rows + first_row * stride - k_begin, stride);
    __syncthreads();

    int turn = 0;
    for (int base = first_block; base < weights.blocks; base += gridDim.x, turn ^= 1) {
        const int mine = base + rank;  // the block that this CTA finishes
        Extra first_extra{0, 0, 0};
        if (mine < weights.blocks) first_extra = first_extra_of<EPILOGUE>(p, 0, columns, mine);
        float sums[2][NT][4];
        clear(sums);
        if (base + warp < weights.blocks) {
            for (int quad = 0; quad < weights.count; ++quad) {
                const bf16* const from = rows + g * stride + 128 * quad + 8 * t;
                const auto rows_of = [&](int u, uint4(&b)[NT]) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        b[j] = uint4{0, 0, 0, 0};  // rows that are not there
                        if (8 * j + g < p.M) b[j] = load_shared(from + 8 * j * stride + 32 * u);
                    }
                };
                weights.multiply(quad, rows_of, sums);
                if (all.trigger == AT_LAST_COPY) trigger_early<EPILOGUE>(weights, true);
            }
        }
        if (all.trigger == AT_END && base + int(gridDim.x) >= weights.blocks) pdl_launch_dependents();
        // Two places in turn: whoever writes one again has passed the barrier of the turn between, behind all readers.
        float* const sums_at = shared + all.sums_at + turn * MAX_PARTS * columns * SUM_STRIDE;
        if (base == first_block) cluster_wait();
        if (base + warp < weights.blocks && rank < parts) {
            put_part(sums_at + rank * columns * SUM_STRIDE, columns, lane, sums,
                     [&](float* place, float sum) { store_cluster(cluster_address(shared_address(place), warp), sum); });
        }
        cluster_arrive();
        cluster_wait();
        if (mine < weights.blocks) finish_block<EPILOGUE>(p, sums_at, parts, 0, columns, mine, first_extra);
    }
}

}  // namespace slipstream
