"""KV of a new engine: its pools, prefix cache, tiers, transfers, events and packing."""
