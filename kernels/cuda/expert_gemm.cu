// The routed experts' kernels, one a variant; expert_launch.py holds the same lists. THREADS and CTAS bound the registers.
#include <expert_gemm.cuh>

#define EXPERTS(KIND, NT, DEPTH, THREADS, CTAS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, CTAS)                                                       \
        experts_##KIND##_##NT##_##DEPTH##_##THREADS##_##CTAS(const __grid_constant__ slipstream::ExpertParams p) {    \
        extern __shared__ float shared[];                                                                             \
        slipstream::experts_##KIND<NT, DEPTH>(p, shared);                                                             \
    }

EXPERTS(gate_up, 1, 7, 512, 1)
EXPERTS(gate_up, 1, 2, 512, 2)
EXPERTS(gate_up, 2, 2, 512, 1)
EXPERTS(gate_up, 4, 2, 512, 1)
EXPERTS(down, 1, 8, 256, 2)
EXPERTS(down, 2, 4, 256, 2)
EXPERTS(down, 4, 2, 256, 2)

extern "C" __global__ void __launch_bounds__(256, 4)
    experts_combine(const __grid_constant__ slipstream::ExpertParams p) {
    slipstream::experts_combine(p);
}
