"""Engines in virtual time: what a cluster would do, computed by the real scheduler and cache."""
