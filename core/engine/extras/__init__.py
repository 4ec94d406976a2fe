"""Optional parts of the loop: tiers of KV, and transfers."""
