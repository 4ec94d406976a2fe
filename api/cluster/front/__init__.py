"""The front: the engine of a server whose replicas compute."""
