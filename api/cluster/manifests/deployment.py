"""Deployment: the replicas or servers that a manifest is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from ...._version import __version__
from ....core.config import EngineConfig
from ....core.errors import InvalidRequest, shown
from ....core.interface.settings import SIZE, check_settings, parse_size, setting
from ....core.validation import MAX_PORT, tcp_port

FRONT_PORT = 5570  # replicas dial in here
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # others are made from it
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Replicas or servers that are wanted, and the engine options of each.

    Raises `InvalidRequest` for a value that is out of range or contradicts another one.
    """

    model: str = setting(
        "smollm2",
        "folder, GGUF file or hub id, as each container or machine finds it",
        "MODEL",
        group="deployment",
        is_basic=True,
    )
    replicas: int = setting(2, "number of replicas, for llm-d of servers", least=1, is_basic=True)
    min_replicas: int | None = setting(
        None, "fewest replicas, where their number follows the load (1)", least=1, is_basic=True
    )
    max_replicas: int | None = setting(
        None, "most replicas, where their number follows the load", least=1, is_basic=True
    )
    front: str = setting(
        f"tcp://127.0.0.1:{FRONT_PORT}",
        "address at which the front listens for replicas",
        "tcp://HOST:PORT",
        is_basic=True,
    )
    route: Literal["kv", "session", "even"] = setting(
        "kv", "choice of the replica for each request, as for `foretoken serve`", is_basic=True
    )
    name: str = setting("foretoken", "name of the objects and of their Secret", "NAME")
    image: str = setting(
        f"foretoken:{__version__}", "image of the containers", "IMAGE", is_basic=True
    )
    port: int = setting(8000, "port of the HTTP API", least=1, most=MAX_PORT, is_basic=True)
    cpus: float = setting(4.0, "CPUs of each replica or server", "X", least=0.1, is_basic=True)
    memory: str | int = setting(
        "8GiB", "memory of each replica or server", SIZE, least=1, is_basic=True
    )
    gpus: int = setting(0, "GPUs of each replica or server (0)", is_basic=True)
    models_claim: str | None = setting(
        None, "PersistentVolumeClaim to mount at /models, read only", "NAME", is_basic=True
    )
    drain_seconds: float = setting(
        30.0, "time for running requests to finish before a process ends", "S", most=1e6
    )
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check each of them, and the options of the engine."""
        check_settings(self)
        name, claim = self.name, self.models_claim
        allowed = f"must be of lower-case letters, digits and -, not {shown(name)}"
        _require(_NAME.fullmatch(name), "name", allowed)
        is_claim = claim is None or _CLAIM.fullmatch(claim) is not None
        _require(is_claim, "models_claim", f"must be the name of a claim, not {shown(claim)}")
        for param in ("model", "image"):
            text = getattr(self, param)
            _require(text.strip() and text[0] != "-", param, f"must be a name, not {shown(text)}")
        _require(tcp_port("front", self.front), "front", "needs a port that replicas can dial")
        self._check_numbers()
        EngineConfig(**self.engine_options)

    def _check_numbers(self) -> None:
        scales = self.max_replicas is not None
        _require(scales or self.min_replicas is None, "min_replicas", "needs max_replicas")
        low, high = self.fewest, self.most
        _require(low <= high, "min_replicas", f"({low}) exceeds max_replicas ({high})")
        allowed = f"({self.replicas}) must be from min_replicas ({low}) to max_replicas ({high})"
        _require(low <= self.replicas <= high, "replicas", allowed)

    @property
    def fewest(self) -> int:
        """Number of replicas that is always there."""
        return self.replicas if self.max_replicas is None else self.min_replicas or 1

    @property
    def most(self) -> int:
        """Number of replicas that there may be."""
        return self.max_replicas or self.replicas

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def num_bytes(self) -> int:
        """Memory of each replica."""
        return parse_size(self.memory)

    @property
    def engine_options(self) -> Mapping[str, Any]:
        """Options of each engine, which uses the CPUs or the GPU that it is given."""
        own = {"device": "cuda"} if self.gpus else {"threads": max(1, int(self.cpus))}
        return {**own, **self.engine}

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return PurePosixPath(self.model).name


def _require(holds: object, param: str, message: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {message}", param=param)
