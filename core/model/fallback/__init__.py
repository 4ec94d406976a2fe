"""Models computed by transformers' own modules on this engine's pages and kernels."""
