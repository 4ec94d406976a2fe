"""The front: the engine of a server that computes nothing, because its replicas do."""
