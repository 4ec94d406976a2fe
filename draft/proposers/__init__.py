"""Proposers: drafters with weights, which run in the model thread."""
