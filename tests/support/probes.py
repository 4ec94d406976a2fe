"""Probes of a container, made as a kubelet makes them, of a server with the container's flags."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

from foretoken.api.serving.settings import Settings

from .given import listening

KINDS = ("startupProbe", "livenessProbe", "readinessProbe")
SECRET = "the-key"


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Variables of a container; those of a Secret have one value, those of a field another."""
    given = {each["name"]: each for each in container.get("env", [])}
    return {
        name: each.get(
            "value", SECRET if "secretKeyRef" in each.get("valueFrom", {}) else "10.0.0.1"
        )
        for name, each in given.items()
    }


def settings_of(container: dict[str, Any], monkeypatch: Any) -> Settings:
    """Settings of a server that has the container's flags and variables."""
    for name, value in variables(container).items():
        monkeypatch.setenv(name, value)
    return listening(*container["args"][1:]).settings


def outcomes(container: dict[str, Any], port: int) -> dict[str, bool]:
    """Whether each probe succeeds on a server that listens at this port."""
    return {kind: _succeeds(container[kind], port, variables(container)) for kind in KINDS}


def _succeeds(probe: dict[str, Any], port: int, env: dict[str, str]) -> bool:
    if "httpGet" in probe:
        url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1) + 20) as answer:
                return 200 <= answer.status < 400
        except urllib.error.HTTPError as error:
            error.close()
            return False
    python, *args = probe["exec"]["command"]
    assert python == "python"
    words = [re.sub(r"(?<=127.0.0.1:)\d+", str(port), each) for each in args]
    return subprocess.run([sys.executable, *words], env=env, capture_output=True).returncode == 0
