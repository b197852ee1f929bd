// The first kernel of a mixture of experts; gate_launch.py holds its parameters.
#include <gate.cuh>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters and bulk copies
extern "C" __global__ void __launch_bounds__(256, 3) gate_rows(const __grid_constant__ slipstream::GateParams p) {
    extern __shared__ __align__(128) float shared[];
    slipstream::gate(p, shared);
}
#endif
