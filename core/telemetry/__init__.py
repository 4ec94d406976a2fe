"""Metrics, statistics of speculative decoding, and observers of requests and steps."""
