"""Engines in virtual time: a cluster's behaviour, computed by the real scheduler and cache."""
