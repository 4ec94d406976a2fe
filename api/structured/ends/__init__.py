"""The shortest completions of structured output, and the tokens after which they still fit."""
