// One kernel per variant; wide_launch.py holds the same list. MAX_WARPS (that sum) and MIN_CTAS on an SM bound the
// registers.
#include <wide_gemm.cuh>

#define WIDE(EPILOGUE, NORM, NT, GROUPS, X_WARPS, MAX_WARPS, MIN_CTAS)                                         \
    extern "C" __global__ void __launch_bounds__(32 * (MAX_WARPS + X_WARPS + 1), MIN_CTAS)                     \
        wide_##EPILOGUE##_##NORM##_##NT##_##GROUPS##_##X_WARPS##_##MAX_WARPS(                                  \
            const __grid_constant__ slipstream::WideParams p) {                                                \
        extern __shared__ __align__(128) float shared[];                                                       \
        slipstream::wide_gemm<EPILOGUE, NORM, NT, GROUPS, X_WARPS, MAX_WARPS>(p, slipstream::own_shared(shared));         \
    }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters and bulk copies
#define FOR_ALL(EPILOGUE, NORM)              \
    WIDE(EPILOGUE, NORM, 2, 1, 2, 8, 2)      \
    WIDE(EPILOGUE, NORM, 4, 1, 2, 8, 2)      \
    WIDE(EPILOGUE, NORM, 8, 1, 4, 8, 1)      \
    WIDE(EPILOGUE, NORM, 8, 1, 4, 14, 1)     \
    WIDE(EPILOGUE, NORM, 8, 2, 4, 12, 1)

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
#endif
