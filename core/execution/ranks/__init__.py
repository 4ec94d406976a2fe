"""Tensor parallelism: rank 0's view of the other ranks, and their process."""
