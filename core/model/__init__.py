"""Models: their files, configs and families, and the decoders that compute them."""
