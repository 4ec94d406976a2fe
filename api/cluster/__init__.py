"""Engines in other processes: a front speaks HTTP, its replicas compute."""
