"""The shortest completions of structured output, and tokens that leave room for them."""
