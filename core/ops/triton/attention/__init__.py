"""Attention over pages, and its division among programs."""
