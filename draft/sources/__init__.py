"""Guesses from token ids alone: look-ups in what was said before, predictions, grammars."""
