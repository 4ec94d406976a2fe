"""Choice of the tokens that a step computes. Pure Python: no torch, no clock, no await."""
