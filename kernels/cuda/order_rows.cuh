// Rows of x on their way into the order in which a product's kernel copies them: read and normed once, in front of it.
#pragma once
#include <epilogue.cuh>

namespace slipstream {

constexpr int ORDER_WARPS = 4, ORDER_CHUNKS = 4;  // of a CTA, and of each of its warps

// place(m, t): where k 8 t .. 8 t + 7 of row m's first chunk of 32 belong; store(to, chunk, v) puts those of a chunk there. A
// CTA takes 8 rows and ORDER_WARPS * ORDER_CHUNKS chunks. rows: a multiple of 8; of those behind the last of x, zeros are
// stored, for a product copies them, too.
template <bool NORM, class Place, class Store>
__device__ inline void order_rows(const Params& p, int rows, const Place& place, const Store& store) {
    pdl_launch_dependents();  // the product, which fetches weights meanwhile
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, chunks = p.K / 32, blocks = rows / 8;
    const int slice = blockIdx.x / blocks, m = 8 * (blockIdx.x - slice * blocks) + g;
    const int first = (slice * ORDER_WARPS + threadIdx.x / 32) * ORDER_CHUNKS;
    uint4 scale[ORDER_CHUNKS] = {}, x[ORDER_CHUNKS] = {};
#pragma unroll
    for (int i = 0; i < ORDER_CHUNKS; ++i) {
        if (NORM && first + i < chunks) scale[i] = load_activation(p.norm_weight + 32 * (first + i) + 8 * t);
    }
    pdl_wait();  // nothing above reads what another kernel writes
#pragma unroll
    for (int i = 0; i < ORDER_CHUNKS; ++i) {
        if (m < p.M && first + i < chunks) x[i] = load_activation(p.x + m * p.x_stride + 32 * (first + i) + 8 * t);
    }
    const float rstd = NORM ? row_rstd<8>(p, m, t) : 0.0f;
    const auto to = place(m, t);
#pragma unroll
    for (int i = 0; i < ORDER_CHUNKS; ++i) {
        if (first + i < chunks) store(to, first + i, NORM && m < p.M ? normed(x[i], rstd, scale[i]) : x[i]);
    }
}

// wgmma's order: pieces 0 and 1 of a chunk are the k of its first MMA, 2 and 3 of its second, in the packed weight's order of k.
__device__ inline void store_for_wgmma(uint32_t* at, const uint4& v) {
    at[0] = v.x;
    at[32] = v.y;
    at[64] = v.z;
    at[96] = v.w;
}

}  // namespace slipstream
