"""Tensor parallelism: the control of the other ranks by rank 0, and the process of such a rank."""
