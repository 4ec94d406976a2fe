"""Embeddings and scores: prompts of which only the output at the last token is needed."""
