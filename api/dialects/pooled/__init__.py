"""Routes that return vectors or scores in place of text."""
