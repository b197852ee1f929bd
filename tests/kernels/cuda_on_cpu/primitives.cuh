// The hardware's part of kernels/cuda on a CPU: CTAs run one after another, each thread of a CTA is a fiber, and barriers,
// shuffles and MMAs are exchanges among fibers. Counts how often each 16 bytes of the weight are read.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(threads, ctas)

struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
float shared[1 << 16];
using std::min;

namespace emulator {
struct Barrier {
    int count = 0;
    long generation = 0;
};
struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    long exchanges = 0;
    bool done = false;
};
struct Exchanged {
    uint32_t words[6];
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static unsigned current;
static Barrier cta_barrier;
static std::vector<Barrier> warp_barriers;             // [warp][whole, lower half, upper half]
static std::vector<Exchanged> exchanged;               // [parity][thread]
static const char* weight_begin;
static std::vector<uint32_t> weight_reads;
static long outside_reads, unwaited_reads;
static const char *activation_begin[8], *activation_end[8];
static int num_activations;
static std::vector<char> waited;

inline void yield() {
    swapcontext(&lanes[current].context, &scheduler);
}
inline void arrive(Barrier& barrier, int size) {
    const long generation = barrier.generation;
    if (++barrier.count == size) {
        barrier.count = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}
// Every lane in `mask` hands in words and sees all of them.
inline const Exchanged* exchange(uint32_t mask, const Exchanged& mine) {
    const unsigned warp = threadIdx.x / 32, thread = threadIdx.x;
    const long parity = lanes[thread].exchanges++ % 2;
    Exchanged* all = &exchanged[parity * blockDim.x];
    all[thread] = mine;
    const int which = mask == 0xffffffffu ? 0 : mask == 0xffffu ? 1 : 2;
    arrive(warp_barriers[3 * warp + which], __builtin_popcount(mask));
    return all + 32 * warp;
}
}  // namespace emulator

inline void __syncthreads() { emulator::arrive(emulator::cta_barrier, int(blockDim.x)); }

namespace slipstream {

using bf16 = uint16_t;

inline uint64_t weight_policy(bool) { return 0; }

inline uint4 load_16(const bf16* address) {
    uint4 v;
    if (reinterpret_cast<uintptr_t>(address) % 16) ++emulator::outside_reads;
    memcpy(&v, address, 16);
    return v;
}
inline uint4 load_weight(const bf16* address, uint64_t) {
    const auto at = reinterpret_cast<const char*>(address) - emulator::weight_begin;
    if (at < 0 || size_t(at / 16) >= emulator::weight_reads.size()) {
        ++emulator::outside_reads;
        return uint4{0, 0, 0, 0};
    }
    ++emulator::weight_reads[at / 16];
    return load_16(address);
}
inline uint4 load_activation(const bf16* address) {
    const char* at = reinterpret_cast<const char*>(address);
    for (int i = 0; i < emulator::num_activations; ++i) {
        if (at >= emulator::activation_begin[i] && at + 16 <= emulator::activation_end[i]) {
            // range 0 is x, which the kernel before writes
            if (i == 0 && !emulator::waited[threadIdx.x]) ++emulator::unwaited_reads;
            return load_16(address);
        }
    }
    ++emulator::outside_reads;
    return uint4{0, 0, 0, 0};
}

inline float4 load_sums(const float* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) ++emulator::outside_reads;
    if (!emulator::waited[threadIdx.x]) ++emulator::unwaited_reads;
    return float4{address[0], address[1], address[2], address[3]};
}

inline float bits_to_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
inline uint32_t float_to_bits(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline uint32_t rounded(float v) {  // to nearest, ties to even
    const uint32_t bits = float_to_bits(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return rounded(low) | rounded(high) << 16; }

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    return pack_bf16(bits_to_float(a << 16) * bits_to_float(b << 16),
                     bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u));
}

// Straight from the fragment tables of the PTX manual: A[r][k] lies with lane 4 (r % 8) + (k % 8) / 2 in register
// (r / 8) + 2 (k / 8), B[k][c] with lane 4 c + (k % 8) / 2 in register k / 8; the lower half of a register is even k.
inline void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const emulator::Exchanged* all = emulator::exchange(0xffffffffu, {{a0, a1, a2, a3, b0, b1}});
    const int lane = threadIdx.x % 32;
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {
            const uint32_t a = all[4 * (row % 8) + (k % 8) / 2].words[row / 8 + 2 * (k / 8)];
            const uint32_t b = all[4 * column + (k % 8) / 2].words[4 + k / 8];
            sum += bits_to_float(k % 2 ? a & 0xffff0000u : a << 16) * bits_to_float(k % 2 ? b & 0xffff0000u : b << 16);
        }
        c[e] += sum;
    }
}

inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float reciprocal_sqrt(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }

inline float shuffle_xor(uint32_t mask, float v, int lane_mask) {
    const emulator::Exchanged* all = emulator::exchange(mask, {{float_to_bits(v)}});
    return bits_to_float(all[(threadIdx.x % 32) ^ lane_mask].words[0]);
}

inline void pdl_launch_dependents() {}
inline void pdl_wait() { emulator::waited[threadIdx.x] = 1; }

}  // namespace slipstream
