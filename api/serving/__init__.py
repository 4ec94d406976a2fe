"""What every route needs: reading a body, errors, server-sent events, limits."""
