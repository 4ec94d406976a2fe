"""Everything that guesses: look-ups, the draft model, and the controller that decides how much."""
