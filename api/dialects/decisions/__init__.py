"""/v1/decisions: OpenAI's Decisions API."""
