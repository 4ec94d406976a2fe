"""Components of an engine other than the target: the drafter and the prefix cache."""
