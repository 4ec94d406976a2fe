"""The built-in model pair: a small target and a smaller draft, trained on Python's library.

Ordinary Hugging Face folders in `builtin/target/` and `builtin/draft/`; `python -m
foretoken.draft.training.train` rebuilds them.
"""
