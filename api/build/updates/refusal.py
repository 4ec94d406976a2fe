"""WeightsRefused: the error of an update of the weights that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ....core.errors import InvalidRequest

NUM_SHOWN = 4  # number of tensors that a message names


class WeightsRefused(InvalidRequest):
    """Raised for new weights that are refused; the present weights stay in use.

    ``tensors``: names of the tensors that are the reason, if any.
    """

    wire_fields: ClassVar[tuple[str, ...]] = ("param", "tensors")

    def __init__(
        self, message: str, *, param: str | None = None, tensors: Iterable[str] = ()
    ) -> None:
        self.tensors = tuple(tensors)
        if self.tensors:
            more = len(self.tensors) - NUM_SHOWN
            shown = ", ".join(self.tensors[:NUM_SHOWN])
            message = f"{message}: {shown}" + (f" and {more} more" if more > 0 else "")
        super().__init__(message, param=param)


class UpdateConflict(WeightsRefused):
    """Raised for a call that does not fit the state of the update, such as a second start."""
