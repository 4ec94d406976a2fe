"""The Python interface: AsyncLLM and LLM."""
