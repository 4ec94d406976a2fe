"""The whole engine in virtual time, driven by one seed.

A loop whose clock is a number (loop.py), a model thread that is a timer (thread.py), a model whose
KV are hashes of what stands before them (model.py), and clients, operators and faults that a seed
chooses (world.py). ``python -m simulation --seeds 20000 --from 0`` in ``tests/`` runs many.
"""
