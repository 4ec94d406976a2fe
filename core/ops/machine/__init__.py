"""The machine that computes: its device, memory, cache folder and identity."""
