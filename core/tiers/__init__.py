"""KV beyond the pool: names for pages, stores that keep them, and news of what is cached."""
