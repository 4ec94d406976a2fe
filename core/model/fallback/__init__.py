"""Models that transformers' own modules compute on our pages and kernels."""
