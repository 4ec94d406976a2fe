"""The API layer: text, sampling options, protocols and the HTTP server."""
