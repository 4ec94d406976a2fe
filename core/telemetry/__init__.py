"""Metrics and statistics of speculation, and what follows requests and steps."""
