"""How much to guess: measured survival against measured prices."""
