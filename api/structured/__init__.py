"""Structured output: from a schema, regex or grammar to token masks."""
