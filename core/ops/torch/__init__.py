"""The operations in torch: the reference for the other backends."""
