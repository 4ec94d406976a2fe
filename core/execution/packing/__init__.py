"""Packing the KV inside an answer: which tokens keep theirs, and what that is chosen by."""
