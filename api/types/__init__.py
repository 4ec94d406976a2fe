"""What the rooms of the API pass to each other: conversations, answers, whose request it is."""
