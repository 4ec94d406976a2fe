"""From logits to tokens: logits processors, truncation, noise, and the one verifier."""
