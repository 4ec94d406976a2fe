"""`foretoken train-draft`: a draft for a target, trained on the target's own answers.

`conversations` reads data, `gathering` and `answers` have the target answer prompts, `teacher`
computes the target's distributions, `students` are the kinds of drafts, `run` is the training loop,
`measuring` evaluates.
"""
