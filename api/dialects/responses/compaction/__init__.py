"""Compaction in the Responses API."""
