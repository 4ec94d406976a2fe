"""The server's own routes: models, tokens, the cache, health, adapters, pages."""
