"""The engine: the asyncio loop between callers and the model thread, and its supervision."""
