"""What is built beside the target: the model that drafts, and what keeps KV beyond a request."""
