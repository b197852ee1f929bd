// One kernel per variant; launch.py holds the same lists. MAX_WARPS and MIN_CTAS (CTAs on an SM) bound the registers.
#include <bulk_gemm.cuh>
#include <skinny_gemm.cuh>

#define SKINNY(EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH, MAX_WARPS, MIN_CTAS)                                   \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_CTAS)                                    \
        skinny_##EPILOGUE##_##NORM##_##NT##_##TM##_##DEPTH##_##X_DEPTH(                                       \
            const __grid_constant__ slipstream::Params p) {                                                   \
        extern __shared__ __align__(128) float shared[];                                                      \
        slipstream::skinny_gemm<EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH, MAX_WARPS>(p, shared);                \
    }

#define BULK(EPILOGUE, NORM, NT, TM, STEP, X_DEPTH, MAX_WARPS, RESIDENT)                                      \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS + 32, 2)                                      \
        bulk_##EPILOGUE##_##NORM##_##NT##_##TM##_##STEP##_##X_DEPTH(                                          \
            const __grid_constant__ slipstream::Params p) {                                                   \
        extern __shared__ __align__(128) float shared[];                                                      \
        slipstream::bulk_gemm<EPILOGUE, NORM, NT, TM, STEP, X_DEPTH, RESIDENT, MAX_WARPS>(p, shared);         \
    }

#define FOR_ALL(EPILOGUE, NORM)                               \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 4, 12, (NORM ? 1 : 2))    \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 4, 12, 1)                 \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 2, 8, 3)                  \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 2, 8, 2)                  \
    SKINNY(EPILOGUE, NORM, 2, 2, 4, 2, 12, 1)                 \
    SKINNY(EPILOGUE, NORM, 2, 2, 4, 1, 8, 2)                  \
    SKINNY(EPILOGUE, NORM, 4, 2, 2, 1, 12, 1)                 \
    SKINNY(EPILOGUE, NORM, 8, 2, 2, 1, 8, 1)                  \
    FOR_BULK(EPILOGUE, NORM)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // no bulk copies
#define FOR_BULK(EPILOGUE, NORM)
#else
#define FOR_BULK(EPILOGUE, NORM)                 \
    BULK(EPILOGUE, NORM, 1, 1, 1, 16, 8, true)   \
    BULK(EPILOGUE, NORM, 1, 2, 1, 4, 8, false)   \
    BULK(EPILOGUE, NORM, 1, 1, 1, 8, 8, false)
#endif

#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
#if SLIPSTREAM_EPILOGUE == 0
FOR_ALL(0, 0)
FOR_ALL(0, 1)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ALL(1, 0)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2, 1)
#else
FOR_ALL(3, 0)
FOR_ALL(3, 1)
#endif
