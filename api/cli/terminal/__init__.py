"""Answers and conversations in the terminal, with a local model or a running server."""
