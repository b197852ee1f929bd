// The kernels over INT4 weights, one a variant; int4_launch.py holds the same list. MAX_THREADS and MIN_CTAS bound the
// registers.
#include <int4_gemm.cuh>

#define INT4(EPILOGUE, NORM, GROUP, NT, DEPTH, STAGED, MAX_THREADS, MIN_CTAS)                                           \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)                                                 \
        int4_##EPILOGUE##_##NORM##_##GROUP##_##NT##_##DEPTH##_##STAGED##_##MAX_THREADS(                                 \
            const __grid_constant__ slipstream::Int4Params p) {                                                         \
        extern __shared__ float shared[];                                                                               \
        slipstream::int4_gemm<EPILOGUE, NORM, GROUP, NT, DEPTH, STAGED>(p, shared);                                     \
    }

#define FOR_ALL(EPILOGUE, NORM, GROUP)             \
    INT4(EPILOGUE, NORM, GROUP, 1, 2, 1, 512, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 1, 1, 1, 256, 3)   \
    INT4(EPILOGUE, NORM, GROUP, 1, 2, 1, 256, 2)   \
    INT4(EPILOGUE, NORM, GROUP, 2, 2, 1, 512, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 2, 2, 1, 256, 2)   \
    INT4(EPILOGUE, NORM, GROUP, 1, 2, 0, 512, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 2, 1, 0, 512, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 4, 1, 0, 512, 1)

#if SLIPSTREAM_EPILOGUE == 0
FOR_ALL(0, 0, SLIPSTREAM_GROUP)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ALL(1, 0, SLIPSTREAM_GROUP)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2, 1, SLIPSTREAM_GROUP)
#else
FOR_ALL(3, 1, SLIPSTREAM_GROUP)
#endif
