"""The machine that computes: its device, its memory, its folder of kept files, its identity."""
