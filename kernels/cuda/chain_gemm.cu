// The kernels of chain_gemm.cuh, named by what the fourth product is (launch.py's Epilogue; n: there are three).
#include <chain_gemm.cuh>

// Two on an SM: attention's registers are to fit beside one.
#define CHAIN(NAME, LAST)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * 9, 2) NAME(const __grid_constant__ slipstream::ChainParams p) { \
        extern __shared__ __align__(128) float shared[];                                                               \
        slipstream::chain_gemm<LAST, 8>(p, slipstream::own_shared(shared));                                            \
    }

CHAIN(chain_n, -1)
CHAIN(chain_0, slipstream::STORE)
CHAIN(chain_3, slipstream::QKV)
