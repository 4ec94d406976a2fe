"""Options of an engine and of a request: declaration and checks of their fields."""
