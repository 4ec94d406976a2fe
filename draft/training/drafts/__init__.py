"""`foretoken train-draft`: a draft for a target, trained on what the target itself says.

`conversations` reads data, `answers` lets the target answer, `teacher` computes what a draft
learns from, `students` are the kinds of drafts, `run` is the loop, `report` measures.
"""
