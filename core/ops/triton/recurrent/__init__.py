"""Recurrent layers: kernels and their inputs."""
