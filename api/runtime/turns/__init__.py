"""The beginnings of next turns, computed while the engine is idle."""
