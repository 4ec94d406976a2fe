"""Parts of the loop that work only where they are asked for: tiers of KV, transfers."""
