"""Replay of recorded sessions: every turn again, as it was or with changes."""
