"""Common ground of all kinds of heads: files, layers, KV, packed matrices, the proposer."""
