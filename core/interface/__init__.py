"""What the packages meet through: requests, steps, and the protocols of drafting."""
