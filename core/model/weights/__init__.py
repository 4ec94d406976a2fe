"""Weights of a decoder: declared tensors, which are read, cast and packed for the kernels."""
