"""Recurrent layers: kernels and what they read of a pass."""
