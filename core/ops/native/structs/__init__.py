"""Weights, states and batches as the structs that the C kernels read."""
