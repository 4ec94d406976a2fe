"""Linear layers, dense and in mixtures of experts."""
