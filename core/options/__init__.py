"""Options of an engine and of a request: how a field is declared, and its checks."""
