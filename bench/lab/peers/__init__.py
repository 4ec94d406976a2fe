"""foretoken compared with other engines: one checkpoint, one machine, each engine's own server."""
