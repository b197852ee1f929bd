// The choice of experts; gate_launch.py holds its parameters.
#include <choose.cuh>

extern "C" __global__ void __launch_bounds__(256, 2) choose_rows(const __grid_constant__ slipstream::ChooseParams p) {
    extern __shared__ __align__(128) float shared[];
    slipstream::choose(p, shared);
}
