"""Components beside the target: the draft model, and the cache that keeps the KV of prompts."""
