"""One request in no dialect: from a conversation to the engine and back."""
