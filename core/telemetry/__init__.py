"""Metrics, statistics of speculation, and tracing."""
