// What the kernels here ask of the hardware, one function each. Tests compile the kernels for the CPU against another
// file of this name (tests/kernels/cuda_on_cpu), so nothing outside this file may use inline PTX or CUDA intrinsics.
#pragma once
#include <cstdint>

namespace slipstream {

using bf16 = uint16_t;  // raw bits

__device__ inline uint64_t weight_policy(bool evict_first) {
    uint64_t policy;
    if (evict_first) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

// 16 bytes that are read once: past L1. Not through the read-only path (.nc): ptxas moves such loads behind
// griddepcontrol.wait, and then nothing is fetched while the kernel before runs.
__device__ inline uint4 load_weight(const bf16* address, uint64_t policy) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address), "l"(policy));
    return v;
}

// 16 bytes that the kernel before may have written: an ordinary load, never through the read-only path.
__device__ inline uint4 load_activation(const bf16* address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// c += A B of one 16 x 16 by 16 x 8 tile; a: rows g, g + 8 (k pair 1), rows g, g + 8 (k pair 2); b: k pairs 1 and 2.
__device__ inline void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Four sums that the kernel before may have written.
__device__ inline float4 load_sums(const float* address) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address));
    return v;
}

// Two products of bf16, each rounded once.
__device__ inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0 changes nothing
    return product;
}

__device__ inline float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }  // never fused with an add
__device__ inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline float reciprocal_sqrt(float x) { return rsqrtf(x); }
__device__ inline float exponential(float x) { return expf(x); }

// Among the lanes named in `mask`.
__device__ inline float shuffle_xor(uint32_t mask, float v, int lane_mask) {
    return __shfl_xor_sync(mask, v, lane_mask);
}

// Programmatic dependent launch: lets the next kernel start; waits until the kernel before is done and its writes are
// seen. Without the launch attribute both do nothing.
__device__ inline void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace slipstream
