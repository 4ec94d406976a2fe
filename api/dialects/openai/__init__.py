"""OpenAI's routes: chat completions, completions, responses."""
