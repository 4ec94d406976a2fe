"""Kernels for NVIDIA GPUs, in Triton, which is imported only if this backend is used."""
