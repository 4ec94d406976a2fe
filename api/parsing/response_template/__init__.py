"""Answers read by a checkpoint's ``response_template``, without code for its family."""
