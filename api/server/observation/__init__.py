"""Observation of requests: logs, metrics, traces."""
