"""KV outside the pool: keys of pages, stores that keep pages, and events of cached pages."""
