"""Trained heads: their files, layers, passes by kernels, and the proposers that draft with them."""
