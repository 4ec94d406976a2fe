"""Parts beside the target: the model that drafts, and the cache that keeps KV of prompts."""
