"""Sampling: logits processors, truncation, noise, and the one verifier."""
