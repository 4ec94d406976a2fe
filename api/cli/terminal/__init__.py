"""Answers and conversations in the terminal, by a model of this process or a running server."""
