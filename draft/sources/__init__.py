"""Draft sources that need token ids only: look-ups in earlier tokens, predictions, grammars."""
