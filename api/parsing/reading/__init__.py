"""Parts that the readers of all formats share: JSON, words and code, calls without marks."""
