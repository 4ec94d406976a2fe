"""Lengths of drafts: measured survival against measured prices."""
