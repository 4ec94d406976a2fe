"""Measurements of our own: not installed."""
