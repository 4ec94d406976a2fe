"""Choice of tokens from logits on a GPU."""
