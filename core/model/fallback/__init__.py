"""Models that transformers' own modules compute, on this engine's KV pages and kernels."""
