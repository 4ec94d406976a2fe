"""ChunkSize: the number of tokens that the idle engine may compute at a time."""

from __future__ import annotations

from ....core.interface.request import Usage

LEAST_SECONDS = 0.03  # a chunk may always take this long
STEPS = 1.5  # a chunk may take as long as this many steps of a single request
DECAY = 1.02  # by which the time of a step is raised, so that an old minimum is forgotten
LEAST_TOKENS, MOST_TOKENS = 16, 2048
MOST_CHANGE = 2.0  # a chunk has at most this many times as many tokens as the one before


class ChunkSize:
    """Size of chunks by measured times. A request that arrives waits for at most one chunk.

    ``page_size``: tokens per page; a chunk has whole pages, at least one. The first chunks are
    small, and later ones grow while they take less than `seconds`.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._step = 0.0  # shortest recent time of a step, in seconds; 0: not measured
        self._tokens = float(LEAST_TOKENS)

    @property
    def tokens(self) -> int:
        """Number of tokens of the next chunk: whole pages, at least one."""
        return max(1, int(self._tokens) // self._page_size) * self._page_size

    @property
    def seconds(self) -> float:
        """Time that a chunk may take."""
        return max(LEAST_SECONDS, STEPS * self._step)

    def observe_answer(self, usage: Usage) -> None:
        """Measure the time of a step by an answer that has ended."""
        steps, seconds = usage.verify_steps - 1, usage.total_time - usage.time_to_first_token
        if steps > 0 and seconds > 0:
            raised = self._step * DECAY or seconds / steps
            self._step = min(raised, seconds / steps)

    def observe_chunk(self, num_tokens: int, seconds: float) -> None:
        """Adapt the size to the time of a chunk of ``num_tokens`` tokens."""
        factor = self.seconds / max(seconds, 1e-6)
        most = min(MOST_TOKENS, self._tokens * MOST_CHANGE)
        least = max(LEAST_TOKENS, self._tokens / MOST_CHANGE)
        self._tokens = min(max(num_tokens * factor, least), most)
