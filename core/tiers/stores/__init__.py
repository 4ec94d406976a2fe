"""Stores of pages outside the pool: host memory, a disk, a remote store, other engines."""
