// The routed experts of a layer in one kernel: expert_stream.cuh.
#include <expert_stream.cuh>

extern "C" __global__ void __launch_bounds__(544, 1) experts_stream(const __grid_constant__ slipstream::StreamParams p) {
    extern __shared__ float shared[];
    slipstream::experts_stream(p, shared);
}
