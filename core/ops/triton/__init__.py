"""Kernels for NVIDIA GPUs, in Triton. Nothing of Triton is imported unless they are asked for."""
