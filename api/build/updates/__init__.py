"""Replacement of a running model's weights by checked new ones."""
