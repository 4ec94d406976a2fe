"""Remote tier: pages in a Mooncake Store, which several engines on several machines share.

A page is an object ``ft/FINGERPRINT/TAG/KEY``: its bytes and their checksum. Mooncake moves the
objects between registered memory and the machine that keeps them, and evicts by itself. This module
was written for Mooncake's clients over TCP, and tested with them.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from ...errors import InvalidRequest
from ...interface.extras.tiers import IsValid, Medium, PageStore
from ..keys import tag_of

CHECK_BYTES = 4
PATIENCE_SECONDS = 2.0  # time limit for reaching the master; Mooncake itself waits much longer
BUFFER_BYTES = 16 << 20  # bytes of Mooncake's own buffer for its messages


class MooncakeStore(PageStore):
    """`PageStore` of pages of ``page_bytes`` on the machines that a Mooncake master chooses.

    ``host`` and ``port``: address of the master. ``lent_bytes``: memory of this machine that is
    lent to the store, for the pages of all engines. Raises `InvalidRequest` if the master cannot be
    reached or the client cannot be loaded.
    """

    medium: Medium = "remote"
    capacity = 0  # unknown here; the master knows the capacity

    def __init__(
        self, host: str, port: int, fingerprint: bytes, page_bytes: int, *, lent_bytes: int = 0
    ) -> None:
        self._prefix = f"ft/{fingerprint.hex()}"
        self._page_bytes = page_bytes
        self._num_put = 0
        self._counts = {"unsound": 0, "given_up": 0, "refused": 0}
        own_host = _reach(host, port)
        self._client = _client()
        status = self._client.setup(
            own_host, "P2PHANDSHAKE", lent_bytes, BUFFER_BYTES, "tcp", "", f"{host}:{port}"
        )
        self._staged = np.zeros(page_bytes + CHECK_BYTES, np.uint8)
        self._at = self._staged.ctypes.data
        if status or self._client.register_buffer(self._at, self._staged.nbytes):
            raise refused(host, port, "cannot set up the Mooncake client")

    def __len__(self) -> int:
        """Return how many pages this process has stored, including pages that were evicted."""
        return self._num_put

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}/{tag_of(key).hex()}/{key.hex()}"

    @override
    def find(self, keys: Sequence[bytes]) -> int:
        found = self._client.batch_is_exist([self._name(key) for key in keys]) if keys else []
        for index, status in enumerate(found):
            if status < 0:
                raise OSError(f"Mooncake returned status {status}")
            if status == 0:
                return index
        return len(found)

    @override
    def get(self, key: bytes, into: memoryview) -> bool:
        if self._client.get_into(self._name(key), self._at, self._staged.nbytes) < 0:
            return False
        page = self._staged[: self._page_bytes]
        if _check_of(page) != self._staged[self._page_bytes :].tobytes():
            self._counts["unsound"] += 1
            return False
        into[:] = page.data
        return True

    @override
    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        del tag  # the key contains it
        if self.find([key]):
            return True
        self._staged[: self._page_bytes] = page
        if not is_valid():
            self._counts["given_up"] += 1
            return False
        check = _check_of(self._staged[: self._page_bytes])
        self._staged[self._page_bytes :] = np.frombuffer(check, np.uint8)
        status = self._client.put_from(self._name(key), self._at, self._staged.nbytes)
        if status:
            self._counts["refused"] += 1
            raise OSError(f"Mooncake returned status {status}")
        self._num_put += 1
        return True

    def flush(self, tag: bytes | None = None) -> None:
        """Drop the pages of the namespace ``tag``; None: all pages with this fingerprint."""
        below = self._prefix if tag is None else f"{self._prefix}/{tag.hex()}"
        status = self._client.remove_by_regex(f"^{below}/.*", True)
        if status < 0:
            raise OSError(f"Mooncake returned status {status}")

    def stats(self) -> Mapping[str, int]:
        """Return the number of lost pages by cause.

        A page was damaged when read, changed while it was copied, or was refused by Mooncake.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Take back the memory that was lent, and disconnect."""
        self._client.close()


def refused(host: str, port: int, reason: str) -> InvalidRequest:
    """Return the one-line `InvalidRequest` for a store that cannot be used."""
    return InvalidRequest(f"--kv-remote mooncake://{host}:{port}: {reason}", param="kv_remote")


def check_reachable(host: str, port: int) -> None:
    """Raise `InvalidRequest` if the client is not installed or no master answers at the address."""
    _client()
    _reach(host, port)


def _reach(host: str, port: int) -> str:
    """Return this machine's address as the master sees it."""
    try:
        with socket.create_connection((host, port), PATIENCE_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise refused(host, port, f"the master cannot be reached ({error})") from None


def _client() -> Any:  # noqa: ANN401 - Mooncake has no types
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        message = f"kv_remote needs the extra mooncake: pip install 'foretoken[mooncake]' ({error})"
        raise InvalidRequest(message, param="kv_remote") from None
    return MooncakeDistributedStore()


def _check_of(page: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return zlib.crc32(page.data).to_bytes(CHECK_BYTES)
