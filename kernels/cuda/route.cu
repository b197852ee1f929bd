// The router's kernel; route_launch.py holds its parameters.
#include <route.cuh>

extern "C" __global__ void __launch_bounds__(256, 2) route_rows(const __grid_constant__ slipstream::RouteParams p) {
    extern __shared__ float shared[];
    slipstream::route(p, shared);
}
