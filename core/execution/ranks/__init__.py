"""Tensor parallelism: rank 0, which controls the other ranks, and the process of such a rank."""
