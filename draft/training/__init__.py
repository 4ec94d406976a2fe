"""`foretoken train-draft`: a draft for a target, trained on the target's own answers.

`conversations` reads data, `traffic` records it, `gathering` and `answers` have the target answer
prompts, `teacher` computes the target's distributions, `students` are the kinds of drafts,
`new_drafts` writes their files, `trainer` is the training loop, `evaluator` measures.
"""
