"""Disk tier: pages by key in files, which the next process on this folder finds again."""

from __future__ import annotations

from pathlib import Path

from .slab_files import LEAST_PAGES, SLAB_BYTES, SlabFiles
from .slotted_store import SlottedStore
from .store_folder import StoreFolder, refusing


class SlabStore(SlottedStore):
    """`SlottedStore` of pages of ``page_bytes`` on a disk.

    ``folder`` has a folder for each fingerprint; ``max_bytes`` limits all of them together.
    ``quota``: share of the pages beyond which a namespace's pages are evicted first.
    ``most_bytes``: the part of ``max_bytes`` for this store; ``least_pages``: least number of pages
    with room; ``noun``: name of the pages in errors.

    Raises `InvalidRequest` for a folder that cannot be used or that another process holds, and for
    a size of too few pages.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        page_bytes: int,
        max_bytes: int,
        *,
        quota: float = 1.0,
        slab_bytes: int = SLAB_BYTES,
        most_bytes: int | None = None,
        least_pages: int = LEAST_PAGES,
        noun: str = "pages",
    ) -> None:
        files = SlabFiles(
            StoreFolder(folder, fingerprint, max_bytes),
            page_bytes,
            slab_bytes,
            most_bytes=max_bytes if most_bytes is None else most_bytes,
            least_pages=least_pages,
            noun=noun,
        )
        try:
            with refusing(folder):
                found = files.load()
                super().__init__(files, "disk", page_bytes, quota)
                self._adopt(found)
        except BaseException:
            files.close()
            raise
