"""Code shared by the readers of all formats: JSON, content and code, calls without delimiters."""
