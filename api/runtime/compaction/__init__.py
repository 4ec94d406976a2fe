"""Compaction: a summary by the model that replaces the earlier part of a conversation."""
