"""Linear layers, dense and of experts."""
