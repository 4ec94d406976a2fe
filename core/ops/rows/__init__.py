"""The rows of a step, written once for each request and laid out in C."""
