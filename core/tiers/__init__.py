"""KV pages outside the pool: their keys, the stores that keep them, and events about pages."""
