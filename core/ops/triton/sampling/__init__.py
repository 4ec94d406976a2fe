"""Choice of tokens by logits, on a GPU."""
