"""Image towers: their weights, their kernels, and the vectors of an image."""
