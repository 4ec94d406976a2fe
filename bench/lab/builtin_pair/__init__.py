"""The making of the built-in model pair: a small target and a smaller draft of Python's library.

``python -m foretoken.bench.lab.builtin_pair`` rebuilds it in tests/builtin/.
"""
