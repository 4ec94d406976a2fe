"""Mixers of a layer: the weights of each in a backend's layout, and its computation by `Ops`."""
