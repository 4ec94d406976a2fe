"""Types of features that few requests use: adapters, images, tiers, transfers, packing."""
