"""Choice of tokens by logits: logits processors, truncation, noise, and the one verifier."""
