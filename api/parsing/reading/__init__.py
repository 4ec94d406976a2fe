"""Code shared by the readers of all formats: JSON, words and code, calls without marks."""
