"""Trained heads: their files, layers, kernel passes, and the proposers that draft with them."""
