"""Which tokens of which requests a step computes. Pure Python: no torch, no clock, no await."""
