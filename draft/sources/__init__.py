"""Guesses from token ids alone: look-ups in earlier tokens, predictions, grammars."""
