"""Facts of the machine: the card, its clocks and driver, and versions of packages."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata

from .gauge import Gauge
from .stage import Place

PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "foretoken")
QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def card(place: Place) -> dict[str, object]:
    """The device as torch sees it, and what its driver tells of it now."""
    return Gauge(place.device).card() | ({} if place.rehearses else _driver_facts())


def versions() -> dict[str, str]:
    """Versions of packages and of Python, by name."""
    from ...._version import __version__

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = __version__ if name == "foretoken" else "absent"
    return found


def _driver_facts() -> dict[str, object]:
    """Clocks in MHz, power in watts; the reason where the driver does not report them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver_version": f"not told: {error}"}
    return dict(zip(QUERY, (cell.strip() for cell in done.stdout.split(",")), strict=False))
