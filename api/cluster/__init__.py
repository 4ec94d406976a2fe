"""Engines in other processes: a front serves HTTP, and its replicas compute."""
