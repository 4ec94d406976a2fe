"""Everything with text or a network in it."""
