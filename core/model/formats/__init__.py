"""Checkpoint formats: each maps tensor names to tensors and metadata to a `DecoderConfig`."""
