"""The Triton kernels of the ops in `kernels/`, one op a file under the op's name. Imported when a CUDA tensor comes."""
