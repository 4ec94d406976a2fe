"""foretoken beside other engines: one checkpoint, one machine, each its own server."""
