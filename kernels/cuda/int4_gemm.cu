// The kernels over INT4 weights, one a variant; int4_launch.py holds the same lists. MIN_CTAS, on an SM, bounds the
// registers.
#include <int4_gemm.cuh>
#include <int4_ring.cuh>
#include <int4_cluster.cuh>

#define INT4(EPILOGUE, NORM, GROUP, NT, DEPTH, STAGED, MIN_CTAS)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::MAX_PARTS, MIN_CTAS)                                  \
        int4_##EPILOGUE##_##NORM##_##GROUP##_##NT##_##DEPTH##_##STAGED(                                                 \
            const __grid_constant__ slipstream::Int4Params p) {                                                         \
        extern __shared__ __align__(128) float shared[];                                                                \
        slipstream::int4_gemm<EPILOGUE, NORM, GROUP, NT, DEPTH, STAGED>(p, shared);                                     \
    }

#define RING(EPILOGUE, NORM, GROUP, NT, X_QUADS, ROWS, MIN_CTAS)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::MAX_PARTS, MIN_CTAS)                                  \
        int4ring_##EPILOGUE##_##NORM##_##GROUP##_##NT##_##X_QUADS##_##ROWS(                                             \
            const __grid_constant__ slipstream::Int4Params p) {                                                         \
        extern __shared__ __align__(128) float shared[];                                                                \
        slipstream::int4_ring<EPILOGUE, NORM, GROUP, NT, X_QUADS, ROWS>(p, shared);                                     \
    }

#define CLUSTER(EPILOGUE, NORM, GROUP, NT)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::MAX_PARTS, 2)                                         \
        int4cluster_##EPILOGUE##_##NORM##_##GROUP##_##NT(const __grid_constant__ slipstream::Int4Params p) {            \
        extern __shared__ __align__(128) float shared[];                                                                \
        slipstream::int4_cluster<EPILOGUE, NORM, GROUP, NT>(p, slipstream::own_shared(shared));                         \
    }

#define FOR_ALL(EPILOGUE, NORM, GROUP)        \
    INT4(EPILOGUE, NORM, GROUP, 1, 1, 1, 2)   \
    INT4(EPILOGUE, NORM, GROUP, 1, 2, 1, 2)   \
    INT4(EPILOGUE, NORM, GROUP, 2, 2, 1, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 1, 2, 0, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 2, 1, 0, 1)   \
    INT4(EPILOGUE, NORM, GROUP, 4, 1, 0, 1)   \
    FOR_RINGS(EPILOGUE, NORM, GROUP)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // no bulk copies
#define FOR_RINGS(EPILOGUE, NORM, GROUP)
#else
#define FOR_RINGS(EPILOGUE, NORM, GROUP)   \
    RINGS_##NORM(EPILOGUE, GROUP)          \
    CLUSTER(EPILOGUE, NORM, GROUP, 2)
#define RINGS_0(EPILOGUE, GROUP)           \
    RING(EPILOGUE, 0, GROUP, 1, 4, 1, 2)
#define RINGS_1(EPILOGUE, GROUP)           \
    RING(EPILOGUE, 1, GROUP, 1, 4, 0, 2)   \
    RING(EPILOGUE, 1, GROUP, 1, 4, 1, 2)
#endif

#if SLIPSTREAM_EPILOGUE == 0
FOR_ALL(0, 0, SLIPSTREAM_GROUP)
#elif SLIPSTREAM_EPILOGUE == 1
FOR_ALL(1, 0, SLIPSTREAM_GROUP)
#elif SLIPSTREAM_EPILOGUE == 2
FOR_ALL(2, 1, SLIPSTREAM_GROUP)
#else
FOR_ALL(3, 1, SLIPSTREAM_GROUP)
#endif
