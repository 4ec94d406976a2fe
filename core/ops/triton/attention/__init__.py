"""Attention over pages, and who computes which part of it."""
