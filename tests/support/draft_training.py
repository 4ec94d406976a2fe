"""Teaching of drafts in tests: short answers, small batches."""

from __future__ import annotations

from foretoken.draft.training.answers import AnswerOptions

ASKING = AnswerOptions(max_tokens=24, num_running=8)
