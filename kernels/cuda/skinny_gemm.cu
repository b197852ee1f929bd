// One kernel per variant; launch.py holds the same list. MAX_WARPS and MIN_CTAS (CTAs on an SM) bound the registers.
#include <skinny_gemm.cuh>

#define SKINNY(EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH, LOOP, MAX_WARPS, MIN_CTAS)                                   \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_CTAS)                                          \
        skinny_##EPILOGUE##_##NORM##_##NT##_##TM##_##DEPTH##_##X_DEPTH##_##LOOP(                                    \
            const __grid_constant__ slipstream::Params p) {                                                         \
        extern __shared__ float shared[];                                                                           \
        slipstream::skinny_gemm<EPILOGUE, NORM, NT, TM, DEPTH, X_DEPTH, (LOOP != 0), MAX_WARPS>(p, shared);          \
    }

#define FOR_ROWS(EPILOGUE, NORM)                              \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 4, 0, 12, (NORM ? 1 : 2)) \
    SKINNY(EPILOGUE, NORM, 1, 2, 3, 3, 2, 8, 2)               \
    SKINNY(EPILOGUE, NORM, 1, 1, 4, 2, 0, 8, 3)               \
    SKINNY(EPILOGUE, NORM, 1, 1, 8, 2, 0, 8, 2)               \
    SKINNY(EPILOGUE, NORM, 1, 1, 8, 2, 2, 8, 2)

#define FOR_ALL(EPILOGUE, NORM)                  \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 4, 0, 12, 1) \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 2, 0, 8, 2)  \
    SKINNY(EPILOGUE, NORM, 1, 2, 4, 2, 2, 8, 2)  \
    SKINNY(EPILOGUE, NORM, 1, 2, 8, 2, 1, 8, 1)  \
    SKINNY(EPILOGUE, NORM, 2, 2, 4, 2, 0, 12, 1) \
    SKINNY(EPILOGUE, NORM, 2, 2, 4, 1, 0, 8, 2)  \
    SKINNY(EPILOGUE, NORM, 4, 2, 2, 1, 0, 12, 1) \
    SKINNY(EPILOGUE, NORM, 8, 2, 2, 1, 0, 8, 1)

#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
#if SLIPSTREAM_EPILOGUE == 0
FOR_ROWS(0, 0)
FOR_ROWS(0, 1)
FOR_ALL(0, 0)
FOR_ALL(0, 1)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ROWS(1, 0)
FOR_ALL(1, 0)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2, 1)
#else
FOR_ALL(3, 0)
FOR_ALL(3, 1)
#endif
