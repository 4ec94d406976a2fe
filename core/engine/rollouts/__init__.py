"""Pause, resume and weight updates of an engine for reinforcement learning."""
