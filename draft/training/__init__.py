"""`foretoken train-draft`: a draft for a target, trained on the target's own answers.

`conversations` reads data, `traffic` records it, `gathering` and `answers` have the target answer
prompts, `teacher` computes the target's distributions, `new_drafts` makes drafts and writes their
files (a head's kind has a `Recipe`), `trainer` is the training loop, `evaluator` measures.
"""
