"""Comparison of two variants of a model on the same tasks, with the same seeds."""
