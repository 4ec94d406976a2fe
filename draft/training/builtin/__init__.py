"""How the built-in model pair was made: a small target and a smaller draft of Python's library.

``python -m foretoken.draft.training.builtin.train`` rebuilds it. Not in the wheel.
"""
