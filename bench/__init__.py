"""Benchmarks that users and reviewers run; see bench/README.md."""
