"""Options of an engine and of a request: declarations and checks of their fields."""
