"""Weights of a decoder: read by name, cast, and packed for the kernels."""
