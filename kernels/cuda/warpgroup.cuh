// As primitives.cuh, what sm_90 alone has (a target of "sm_90a"): products of a group of four warps, registers that move
// among warps, copies into several CTAs. Tests have a file of this name, too.
#pragma once
#include <primitives.cuh>

namespace slipstream {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// `bytes` (a multiple of 16) into the CTAs of the cluster that `mask` names, at the same place and barrier of each: this
// CTA, of `rank`, or several.
__device__ inline void bulk_load_to(uint32_t to, const bf16* from, int bytes, uint32_t barrier, uint64_t policy, int rank,
                                    uint32_t mask) {
    if (mask == 1u << rank) {
        bulk_load(to, from, bytes, barrier, policy);
        return;
    }
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4, %5;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t(mask)), "l"(policy)
        : "memory");
}
// All threads of a group of four warps hand registers back, or take some: so many does each have then.
template <int COUNT>
__device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// 8 x 8 numbers of 16 bits, a row's in four lanes, turned: rows g and columns 2 t, 2 t + 1 change places.
__device__ inline uint32_t turned(uint32_t v) {
    uint32_t w;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
    return w;
}
// What wgmma knows of a B operand in shared memory, 16 k by N columns: pieces of 8 columns by 8 k, a column's 16 bytes in
// a row, `next_k` and `next_columns` bytes from one piece to the next.
__device__ inline uint64_t wgmma_operand(uint32_t address, int next_k, int next_columns) {
    return uint64_t((address & 0x3ffffu) >> 4) | uint64_t(next_k >> 4) << 16 | uint64_t(next_columns >> 4) << 32;
}
// The same so many bytes further on.
__device__ inline uint64_t wgmma_moved(uint64_t operand, uint32_t bytes) {
    return (operand >> 32 << 32) | (uint32_t(operand) + (bytes >> 4));
}
// Before the first product, and whenever registers that it reads were written by others.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// All products so far are a group; then all but the last PENDING groups are done.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Sums that products wrote are read behind this, not moved before it.
template <int COUNT>
__device__ inline void wgmma_done(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// sums += A B, A a warp's 16 rows in registers as for mma_16x8x16, B in shared memory; sums of 8 columns after those of
// 8 columns, each as mma_16x8x16 has them. Runs on; a and sums must not be touched before wgmma_wait.
#define WGMMA_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define WGMMA_16(i) WGMMA_4(i), WGMMA_4(i + 4), WGMMA_4(i + 8), WGMMA_4(i + 12)
#define WGMMA_TO_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_TO_31 WGMMA_TO_15 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_TO_63                                                                                       \
    WGMMA_TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
                "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(N, SUMS, A, ...)                                                                                 \
    __device__ inline void wgmma(float (&sums)[N / 2], uint4 a, uint64_t b) {                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, " A ", 1, 1, 1, 0;" \
                     : __VA_ARGS__                                                                             \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                        \
    }
WGMMA(32, WGMMA_TO_15, "{%16, %17, %18, %19}, %20", WGMMA_16(0))
WGMMA(64, WGMMA_TO_31, "{%32, %33, %34, %35}, %36", WGMMA_16(0), WGMMA_16(16))
WGMMA(128, WGMMA_TO_63, "{%64, %65, %66, %67}, %68", WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48))
#undef WGMMA
#undef WGMMA_TO_63
#undef WGMMA_TO_31
#undef WGMMA_TO_15
#undef WGMMA_16
#undef WGMMA_4
#endif

}  // namespace slipstream
