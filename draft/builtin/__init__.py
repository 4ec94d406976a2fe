"""The built-in model pair: a small target and a smaller draft, trained on Python's library.

Ordinary Hugging Face folders in `target/` and `draft/`; `python -m foretoken.draft.builtin.train`
rebuilds them.
"""
