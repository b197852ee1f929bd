// The kernel with one epilogue, and what orders x for it. A thread begins with 168 registers: 384 have all of an SM's.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // nothing on other cards
#include <prompt_gemm.cuh>

#define ORDER(NORM)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * slipstream::ORDER_WARPS, 9)    \
        order_##NORM(const __grid_constant__ slipstream::PromptParams p) {           \
        slipstream::order_for_wgmma<NORM>(p);                                        \
    }
#define PROMPT(EPILOGUE)                                                             \
    extern "C" __global__ void __launch_bounds__(slipstream::PROMPT_THREADS, 1)      \
        prompt_##EPILOGUE(const __grid_constant__ slipstream::PromptParams p) {      \
        extern __shared__ __align__(128) float shared[];                             \
        slipstream::prompt_gemm<EPILOGUE>(p, slipstream::own_shared(shared));        \
    }

#ifndef SLIPSTREAM_EPILOGUE
#error "compile once for each epilogue: -DSLIPSTREAM_EPILOGUE=0..3"
#endif
ORDER(0)
ORDER(1)
#if SLIPSTREAM_EPILOGUE == 0
PROMPT(0)
#elif SLIPSTREAM_EPILOGUE == 1
PROMPT(1)
#elif SLIPSTREAM_EPILOGUE == 2
PROMPT(2)
#else
PROMPT(3)
#endif
#endif
