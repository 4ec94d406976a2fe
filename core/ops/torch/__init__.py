"""The operations in torch: the oracle of the other backends."""
