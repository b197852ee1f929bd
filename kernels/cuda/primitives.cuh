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

// 8 bytes of scales, as load_weight.
__device__ inline uint2 load_scales(const bf16* address) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

// Bits 4 i .. + 3 and 16 + 4 i .. + 3 of a word, less 8, as two bf16. Exact: nibble | 0x4300 is 128 + nibble.
__device__ inline uint32_t integers(uint32_t word, int i) {
    uint32_t v;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word >> (4 * i)));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(v), "r"(0x3f803f80u), "r"(0xc308c308u));  // * 1 - 136
    return v;
}

// As mma_16x8x16 with c = 0 before.
__device__ inline void mma_16x8x16_from_zero(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

__device__ inline uint32_t shuffle(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
__device__ inline int atomic_add(int32_t* at, int v) { return atomicAdd(at, v); }  // what was there before
__device__ inline uint32_t atomic_or(uint32_t* at, uint32_t v) { return atomicOr(at, v); }
__device__ inline uint32_t reduce_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }  // of a warp
__device__ inline uint32_t reduce_min(uint32_t v) { return __reduce_min_sync(0xffffffffu, v); }
__device__ inline int popcount(uint32_t v) { return __popc(v); }
__device__ inline uint32_t float_to_bits(float v) { return __float_as_uint(v); }
// What this thread wrote before is seen by whoever sees what it writes after.
__device__ inline void memory_fence() { __threadfence(); }
// Past L1, which may hold what lay here when the CTA before ran: of lists that the kernel before, or other CTAs, wrote.
__device__ inline int load_list(const int32_t* address) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
__device__ inline float load_fresh(const float* address) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}
__device__ inline uint4 load_fresh_16(const bf16* address) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
__device__ inline float4 load_fresh_4(const float* address) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
__device__ inline void sync_warp() { __syncwarp(); }
__device__ inline void store_16(bf16* to, uint4 v) { *reinterpret_cast<uint4*>(to) = v; }
__device__ inline void store_shared(bf16* to, uint4 v) { *reinterpret_cast<uint4*>(to) = v; }
__device__ inline uint4 load_shared(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }

// Barriers in shared memory and copies that arrive at them, all by address in shared memory. A barrier's phase is over
// when all that it counts have arrived and all the bytes that it was told to expect are there; waiting for parity 0 is
// waiting for the first phase.
#if __CUDA_ARCH__ >= 900
__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
__device__ inline void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Copies see the barriers.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {  // arrives, too
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
// `bytes` (a multiple of 16) into shared memory.
__device__ inline void bulk_load(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// The same of what the kernel before wrote: behind pdl_wait and copies_see_memory.
__device__ inline void bulk_load_written(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t policy) {
    bulk_load(to, from, bytes, barrier, policy);
}
// The same into all `ctas` CTAs of the cluster, at the same place of each, and at the same barrier of each.
__device__ inline void bulk_load_to_all(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t policy,
                                        int ctas) {
    if (ctas == 1) {
        bulk_load(to, from, bytes, barrier, policy);
        return;
    }
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4, %5;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t((1 << ctas) - 1)), "l"(policy)
        : "memory");
}
// Copies issued from here on see what was seen in memory before.
__device__ inline void copies_see_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// The 128 bytes around `from` into the L2.
__device__ inline void prefetch(const bf16* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ inline uint4 load_shared(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ inline uint2 load_shared_8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
// The first `threads` threads of the CTA.
__device__ inline void sync_some(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
// The same value, of which the compiler knows nothing: what is computed from it is not kept in registers over a loop.
__device__ inline int opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Clusters: CTAs that are on the card together and reach each other's shared memory. `rank`: a CTA's place in its own.
__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
// The CTA's part of dynamic shared memory: what it was given (on an emulated GPU a cluster's CTAs share the array).
__device__ inline float* own_shared(float* shared) { return shared; }
// All threads of all CTAs.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Where the CTA of `rank` has what lies at `address` here.
__device__ inline uint32_t cluster_address(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// At a barrier of any CTA of the cluster, by one that has read and not written: nothing is flushed, which took a fence.
__device__ inline void barrier_arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// As barrier_wait, by who then reads what CTAs of the cluster wrote.
__device__ inline void barrier_wait_for_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
// 16 bytes into shared memory of any CTA of the cluster, counted by a barrier of that CTA.
__device__ inline void send_sums(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
                 : "memory");
}
__device__ inline void store_shared(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void store_shared(uint32_t to, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
// Into the shared memory of any CTA of the cluster, by `cluster_address`.
__device__ inline void store_there(uint32_t to, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ inline float load_shared_float(uint32_t from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}
#endif

// Between CTAs that are on the card together.
__device__ inline int load_acquire(const int32_t* address) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
// Until others have counted `at` up to `least`; what they wrote before is seen.
__device__ inline void wait_for_count(const int32_t* at, int least) {
    while (load_acquire(at) < least) {
    }
}
// Until one thread of each of `ctas` CTAs is here, of which one leads. Each turn of all flips the sign and leaves the rest.
__device__ inline void grid_wait(int32_t* at, int ctas, bool leads) {
    memory_fence();
    const int before = atomic_add(at, leads ? int(0x80000000u - unsigned(ctas - 1)) : 1);
    while (((load_acquire(at) ^ before) & int(0x80000000u)) == 0) {
    }
    memory_fence();
}
// One more, behind all that this warp wrote before its last sync_warp.
__device__ inline void count_out(int32_t* at) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(at) : "memory");
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
