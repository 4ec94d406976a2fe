"""Checks before a route: connections and their limits, keys, origins, the path below a proxy."""
