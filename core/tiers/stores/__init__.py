"""Stores of pages beyond the pool: memory of the host, a disk, a remote store, other engines."""
