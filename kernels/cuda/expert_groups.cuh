// What the choice of experts has in common in choose.cuh and route.cuh: keys of scores, and groups of experts.
#pragma once
#include <epilogue.cuh>

#include <cmath>

namespace slipstream {

// A key whose order is that of floats; 0 is below all.
__device__ inline uint32_t order_key(float v) {
    const uint32_t bits = float_to_bits(v);
    const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return key ? key : 1u;
}

// Keys of experts outside the groups that score highest by their two best are made 0. Lane l of a warp holds the keys of
// experts l + 32 i. P: params that say E, groups and groups_kept. sums: of a row, with bias.
template <class P, int EACH>
__device__ inline void keep_groups(const P& p, const float* sums, uint32_t (&keys)[EACH], int lane) {
    const int size = p.E / p.groups;
    float first = -INFINITY, second = -INFINITY;  // lane g: of group g
    if (lane < p.groups) {
        for (int e = lane * size; e < (lane + 1) * size; ++e) {
            const float v = sums[e];
            if (v > first) {
                second = first;
                first = v;
            } else if (v > second) {
                second = v;
            }
        }
    }
    uint32_t mine = lane < p.groups ? order_key(size > 1 ? first + second : first) : 0u, kept = 0;
    for (int i = 0; i < p.groups_kept; ++i) {
        const uint32_t most = reduce_max(mine);
        const uint32_t group = reduce_min(mine == most ? uint32_t(lane) : 0xffffffffu);
        kept |= 1u << group;
        if (uint32_t(lane) == group) mine = 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int e = lane + 32 * i;
        if (e < p.E && !(kept >> (e / size) & 1u)) keys[i] = 0;
    }
}

}  // namespace slipstream
