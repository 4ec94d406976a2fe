"""Attention over pages, and how it is divided among programs."""
