"""Routes that verify recorded answers of OpenAI's routes."""
