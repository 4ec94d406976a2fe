"""Code that all routes share: reading bodies, errors, server-sent events, limits."""
