"""Common code of all kinds of heads: files, layers, KV, packed matrices, the proposer."""
