"""The HTTP server: routes, keys, limits, errors, metrics."""
