"""Addresses of arrays, to pass them to C."""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray


def address_of(numbers: NDArray[Any]) -> int:
    """Return the address of a contiguous, writable array; 0 if it is empty.

    A step needs some thirty addresses, and numpy's ``ctypes.data`` takes four times as long.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(numbers)) if numbers.size else 0
