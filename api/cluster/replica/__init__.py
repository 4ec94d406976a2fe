"""A replica: an engine in a process of its own, whose requests come from a front."""
