"""Measurements for the project's own development; they are not installed."""
