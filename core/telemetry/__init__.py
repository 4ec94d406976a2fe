"""Metrics, statistics of speculation, and observers of requests and steps."""
