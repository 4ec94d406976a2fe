"""Embeddings and scores: prompts computed for the output of their last token."""
