"""Route of vLLM's that opens a group of GPUs for weight transfer, which is refused."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...serving.decoding import decoder
from ...serving.dialect import post
from ...serving.errors import ApiError
from ..routes.protocol import Status
from .routes import CHANGES, RolloutRoutes


class OpenTransfer(Struct, kw_only=True):
    """Body of /init_weight_transfer_engine: how the trainer and the server would meet."""

    init_info: dict[str, Any]


decode_open = decoder(OpenTransfer)


class TransferRoutes(RolloutRoutes):
    """The route of NCCL, which this server does not support."""

    @post(
        "/init_weight_transfer_engine",
        Status,
        body=OpenTransfer,
        errors=CHANGES,
        is_operators=True,
    )
    async def open_transfer(self, request: Request) -> Response:
        """Refuse to join a group of GPUs: weights arrive as safetensors only."""
        self._rollouts(request)
        decode_open(await self.service.read_bytes(request))
        message = (
            "NCCL is not supported: send the weights to /update_weights as a folder of safetensors "
            "(update_info.path) or as parts of a file (update_info.data)"
        )
        raise ApiError(400, message, param="init_info", code="nccl_not_supported")
