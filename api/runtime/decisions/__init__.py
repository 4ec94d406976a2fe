"""Decisions: questions about one input, answered by the probabilities of listed labels."""
