"""Sampling: logits processors, truncation, noise, and the verifier of drafts."""
