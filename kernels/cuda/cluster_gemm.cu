// One kernel per variant; cluster_launch.py holds the same list. One CTA stands on an SM.
#include <cluster_gemm.cuh>

// CTAs that order the next product's x stand on the SMs that have no cluster: a product takes all registers, for with
// fewer the compiler lets every wgmma wait for the one before.
#define ORDER(NORM)                                                               \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::ORDER_WARPS, 9) \
        order_##NORM(const __grid_constant__ slipstream::ClusterParams p) {       \
        slipstream::order_x_for_wgmma<NORM>(p);                                   \
    }
#define CLUSTER(EPILOGUE, COLUMNS, GROUPS)                                                               \
    extern "C" __global__ void __maxnreg__(128)                                                          \
        cluster_##EPILOGUE##_##COLUMNS##_##GROUPS(const __grid_constant__ slipstream::ClusterParams p) { \
        extern __shared__ __align__(128) float shared[];                                                 \
        slipstream::cluster_gemm<EPILOGUE, COLUMNS, GROUPS>(p, slipstream::own_shared(shared));          \
    }

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FOR_ALL(EPILOGUE)    \
    CLUSTER(EPILOGUE, 32, 3) \
    CLUSTER(EPILOGUE, 64, 2) \
    CLUSTER(EPILOGUE, 64, 3)

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
