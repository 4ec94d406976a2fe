"""Drafting: sources of draft tokens, proposers, and the controller of draft sizes."""
