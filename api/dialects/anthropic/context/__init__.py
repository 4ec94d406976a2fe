"""Context management in Anthropic's API: edits of the conversation, and compaction."""
