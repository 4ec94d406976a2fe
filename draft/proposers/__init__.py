"""Guesses with weights."""
