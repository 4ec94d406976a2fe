"""A soak: a real server, under all that clients do to servers, for an hour; `make soak`."""
