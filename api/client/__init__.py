"""`Client` and `AsyncClient`: the HTTP API from Python, with what foretoken adds to it."""
