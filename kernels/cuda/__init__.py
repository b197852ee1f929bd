"""Kernels in CUDA C++, for what the Triton kernels of `kernels/gpu/` do not reach. Compiled by nvcc at first start."""
