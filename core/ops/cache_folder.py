"""The folder of files that are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``FORETOKEN_CACHE``, else foretoken's folder in the user's cache."""
    own = os.environ.get("FORETOKEN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
