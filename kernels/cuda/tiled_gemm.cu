// The kernel with one epilogue, and what orders x for it.
#include <tiled_gemm.cuh>

#define ORDER(NORM)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::ORDER_WARPS, 8)  \
        order_##NORM(const __grid_constant__ slipstream::WideParams p) {           \
        slipstream::order_x<NORM>(p);                                              \
    }
#define TILED(EPILOGUE)                                                             \
    extern "C" __global__ void __launch_bounds__(slipstream::TILED_THREADS, 2)      \
        tiled_##EPILOGUE(const __grid_constant__ slipstream::WideParams p) {        \
        extern __shared__ __align__(128) float shared[];                            \
        slipstream::tiled_gemm<EPILOGUE>(p, slipstream::own_shared(shared));        \
    }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // bulk copies
#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
ORDER(0)
ORDER(1)
#if SLIPSTREAM_EPILOGUE == 0
TILED(0)
#elif SLIPSTREAM_EPILOGUE == 1
TILED(1)
#elif SLIPSTREAM_EPILOGUE == 2
TILED(2)
#else
TILED(3)
#endif
#endif
