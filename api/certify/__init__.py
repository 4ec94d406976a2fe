"""Certificates that answers are exact, and recorded requests that can be computed again."""
