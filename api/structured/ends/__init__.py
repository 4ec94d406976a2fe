"""The shortest ends of structured output, and which tokens leave room for them."""
