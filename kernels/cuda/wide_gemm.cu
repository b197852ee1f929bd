// One kernel per variant; wide_launch.py holds the same list. 8 warps sum, one copies; one CTA stands on an SM.
#include <wide_gemm.cuh>

#define ORDER(NORM)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::ORDER_WARPS, 8)  \
        order_##NORM(const __grid_constant__ slipstream::WideParams p) {           \
        slipstream::order_x<NORM>(p);                                              \
    }
#define WIDE(EPILOGUE, NT, GROUPS)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * 9, 1)                                         \
        wide_##EPILOGUE##_##NT##_##GROUPS(const __grid_constant__ slipstream::WideParams p) {       \
        extern __shared__ __align__(128) float shared[];                                            \
        slipstream::wide_gemm<EPILOGUE, NT, GROUPS>(p, slipstream::own_shared(shared));             \
    }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters and bulk copies
#define FOR_ALL(EPILOGUE)    \
    WIDE(EPILOGUE, 2, 1)    \
    WIDE(EPILOGUE, 4, 1)    \
    WIDE(EPILOGUE, 8, 1)    \
    WIDE(EPILOGUE, 8, 2)

#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
ORDER(0)
ORDER(1)
#if SLIPSTREAM_EPILOGUE == 0
FOR_ALL(0)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ALL(1)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2)
#else
FOR_ALL(3)
#endif
#endif
