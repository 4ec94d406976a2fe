"""Formats of tool calls, one per file: marks, reader, grammar, and preparation of messages."""
