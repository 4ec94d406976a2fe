"""/weights_checker, the path and the answer of SGLang's: checksums of the weights in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest
from ...build.updates.new_weights import WeightFolder
from ...serving.decoding import decoder
from ...serving.dialect import post
from ...serving.errors import JsonResponse
from .routes import CHANGES, RolloutRoutes


class CheckWeights(Struct, kw_only=True):
    """Body of /weights_checker.

    ``action``: return checksums, or compare the weights with a folder's. ``path``: the folder.
    """

    action: Literal["checksum", "compare"] = "checksum"
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class RankChecksums(Struct, kw_only=True):
    """SHA-256 of the packed tensors in memory, by name, and of all except the self-draft's."""

    checksums: dict[str, str]
    per_gpu_checksum: str


class WeightsChecked(Struct, kw_only=True):
    """Answer of /weights_checker. ``success``: whether a comparison found the same weights."""

    success: bool
    message: str
    weight_version: str
    ranks: list[RankChecksums] | UnsetType = UNSET
    per_engine_checksum: str | UnsetType = UNSET
    different: list[str] | UnsetType = UNSET


decode_check = decoder(CheckWeights)


class WeightChecker(RolloutRoutes):
    """The route that checks the weights. It exists with ``--allow-weight-updates``."""

    @post(
        "/weights_checker",
        WeightsChecked,
        body=CheckWeights,
        is_body_needed=False,
        errors=CHANGES,
        is_operators=True,
    )
    async def check(self, request: Request) -> Response:
        """Return checksums of the weights in memory, or compare them with a folder's weights."""
        rollouts = self._rollouts(request)
        data = await self.service.read_bytes(request)
        body = decode_check(data) if data.strip() else CheckWeights()
        if body.action == "checksum":
            found = await rollouts.checksums()
            rank = RankChecksums(checksums=found.tensors, per_gpu_checksum=found.target)
            return JsonResponse(
                WeightsChecked(
                    success=True,
                    message=f"{len(found.tensors)} tensors",
                    weight_version=found.weight_version,
                    ranks=[rank],
                    per_engine_checksum=found.target,
                )
            )
        if body.path is None:
            raise InvalidRequest("path is required to compare the weights", param="path")
        different = await rollouts.differences(WeightFolder(Path(body.path)))
        return JsonResponse(
            WeightsChecked(
                success=not different,
                message=f"{len(different)} tensors differ"
                if different
                else "the weights are equal",
                weight_version=rollouts.weight_version,
                different=different,
            )
        )
