"""Drafting: look-up sources, proposers, and the controller that decides how much is drafted."""
