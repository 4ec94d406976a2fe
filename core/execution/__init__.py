"""Computation of one step in the model thread, from a plan to its outcome."""
