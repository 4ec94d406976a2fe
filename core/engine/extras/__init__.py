"""Optional parts of the engine's loop: KV tiers, and transfers of pages to other engines."""
