"""Routes whose answer is no text: vectors and scores."""
