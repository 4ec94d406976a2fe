"""`foretoken train-draft`: trains a draft for a target on the target's own answers.

`conversations` reads data, `traffic` records it, `gathering` and `answers` let the target answer
prompts, `teacher` computes the target's distributions, `new_drafts` makes drafts and writes their
files (each kind of head has a `Recipe`), `trainer` is the training loop, and `evaluator` measures
acceptance.
"""
