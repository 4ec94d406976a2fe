"""How much to guess: measured odds against measured prices."""
