"""Formats of tool calls, one per file: delimiters, reader, grammar, and preparation of messages."""
