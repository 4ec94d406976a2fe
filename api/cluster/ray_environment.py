"""Environment variables of Ray, set before Ray is imported, because the import reads them."""

from __future__ import annotations

import os
import secrets

RAY_ADDRESS = "RAY_ADDRESS"
GIVE_UP_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
NOWHERE = ("", "local")  # values of RAY_ADDRESS that name no running Ray


def is_joined() -> bool:
    """Whether ``RAY_ADDRESS`` names a running Ray cluster to join."""
    return os.environ.get(RAY_ADDRESS, "") not in NOWHERE


def prepare() -> None:
    """Set the environment variables for starting Ray or joining a Ray cluster."""
    # By default a process ends one minute after the loss of the head. Replicas must go on serving.
    os.environ[GIVE_UP_SECONDS] = str(10**8)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    if is_joined():
        # The number of attempts to reach the head, of 40 s each; the default is 20.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    else:
        _close()


def _close() -> None:
    """Require a random token from every client of the Ray that is about to start.

    Ray's processes listen on every network interface, even if they are given one address.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
