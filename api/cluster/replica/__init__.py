"""A replica: an engine in its own process, whose requests come from a front."""
