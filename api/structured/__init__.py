"""Structured output: from a schema, regex or grammar to masks of tokens."""
