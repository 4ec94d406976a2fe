"""Tensor parallelism: the other ranks of a model, seen from rank 0, and their process."""
