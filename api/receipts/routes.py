"""GET /v1/receipts/key: the public keys with which receipts are checked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from ..serving.dialect import Endpoints, get
from ..serving.errors import JsonResponse
from ..serving.serving_context import Service
from ..serving.settings import Settings
from .keys import PublicKeys
from .signer import ReceiptSigner


class ReceiptRoutes(Endpoints):
    """The public keys of a server that is started with ``--receipts``."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        ReceiptSigner.of(service)  # a bad key file ends the start

    @classmethod
    @override
    def is_served(cls, settings: Settings) -> bool:
        return settings.receipts is not None

    @get("/v1/receipts/key", PublicKeys)
    async def keys(self, request: Request) -> Response:  # noqa: ARG002
        """Return the public keys of receipts; the server must be started with --receipts."""
        signer = ReceiptSigner.of(self.service)
        return JsonResponse(None if signer is None else signer.keys.public)
