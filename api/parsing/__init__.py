"""What a model's text means: thinking, words for the user, calls of tools."""
