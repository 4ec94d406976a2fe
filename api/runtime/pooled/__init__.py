"""Embeddings and scores: prompts that are computed for their last row, without an answer."""
