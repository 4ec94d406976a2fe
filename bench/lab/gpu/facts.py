"""Facts about the machine: the card, its clocks and driver, and versions of packages."""

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
    """Return the device as torch sees it, and the current values from its driver."""
    return Gauge(place.device).card() | ({} if place.rehearses else _driver_facts())


def versions() -> dict[str, str]:
    """Return versions of Python and of packages, by name."""
    from ...._version import __version__

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = __version__ if name == "foretoken" else "absent"
    return found


def _driver_facts() -> dict[str, object]:
    """Return clocks in MHz and power in watts, or the reason why they are not available."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver_version": f"unknown: {error}"}
    return dict(zip(QUERY, (cell.strip() for cell in done.stdout.split(",")), strict=False))
