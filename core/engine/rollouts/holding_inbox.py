"""HoldingInbox: an inbox that can hold new requests back from the scheduler."""

from __future__ import annotations

from typing_extensions import override

from ...interface.request import Request
from ..inbox import RequestInbox


class HoldingInbox(RequestInbox):
    """Inbox that holds back the requests that arrive after `hold`, until `let_go`."""

    _is_holding = False
    _num_earlier = 0  # number of arrivals before `hold` that the scheduler does not have yet

    @property
    def num_earlier(self) -> int:
        """Number of requests before `hold` that the scheduler does not have yet."""
        return self._num_earlier

    def hold(self) -> None:
        """Hold back the requests that arrive from now on."""
        if not self._is_holding:
            self._is_holding, self._num_earlier = True, len(self._arrived)

    def let_go(self) -> None:
        """Let the next `drain` pass all requests on."""
        self._is_holding, self._num_earlier = False, 0

    @override
    def drain(self, now: float) -> None:
        """Pass requests and aborts to the scheduler, and end requests past their deadline.

        A request that is held back is passed on only if it was aborted or its deadline has passed:
        then the scheduler ends it at once.
        """
        if not self._is_holding:
            super().drain(now)
            return
        aborted = {*self._aborted}
        passed: list[tuple[Request, float]] = []
        held: list[tuple[Request, float]] = []
        for number, (request, arrival) in enumerate(self._arrived):
            is_late = request.deadline is not None and arrival + request.deadline <= now
            ends = is_late or request.request_id in aborted
            (passed if ends or number < self._num_earlier else held).append((request, arrival))
        self._arrived, self._num_earlier = passed, 0
        super().drain(now)
        self._arrived = held
        self._num_arrived.update(request.tenant for request, _ in held)
