"""The path of one request, independent of the API: from a conversation to the engine and back."""
