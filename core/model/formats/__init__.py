"""Formats of a model's files: each gives the fields of a config.json, and tensors by name."""
