"""File formats of models: each yields the fields of a config.json, and tensors by name."""
