"""Weights, states and batches as the C kernels' structs."""
