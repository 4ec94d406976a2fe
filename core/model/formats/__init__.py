"""File formats of models: each gives the fields of a config.json, and tensors by name."""
