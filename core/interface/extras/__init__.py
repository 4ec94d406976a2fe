"""Types of features that most requests do without: adapters, images, tiers, transfers, packing."""
