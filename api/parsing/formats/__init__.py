"""Formats of tool calls, one file each: marks, reader, grammar, and how messages are prepared."""
