"""Checks before routing: connections and their limits, API keys, origins, the root path."""
