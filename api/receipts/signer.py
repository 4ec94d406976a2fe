"""ReceiptSigner: signs the answers of a server that is started with ``--receipts``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from ..._version import __version__
from ...core.errors import ForetokenError
from ..certify.records import engine_facts, kernels_of, plain_params
from ..runtime.generation import EndedChoice
from ..serving.serving_context import Service
from ..types.request_context import adapter_name
from .keys import SigningKeys
from .receipt import VERSION, Receipt, Statement, digest_of, hash_of, sign


class ReceiptSigner:
    """Signs statements about answers of one model. Raises `InvalidRequest` for bad key files."""

    def __init__(self, service: Service, file: Path) -> None:
        self._service = service
        self.keys = SigningKeys.load(file)
        self._model_digest = ""  # set by `prepare`
        self._hashing: asyncio.Task[str] | None = None

    @classmethod
    def of(cls, service: Service) -> ReceiptSigner | None:
        """Return the server's signer; None if it signs no answers."""
        file = service.settings.receipts
        if file is None:
            return None
        if cls not in service.shared:
            service.shared[cls] = cls(service, Path(file))
        found: ReceiptSigner = service.shared[cls]
        return found

    @classmethod
    async def prepare(cls, service: Service) -> None:
        """Hash the model's files, in a thread, unless the server signs no answers.

        An answer is computed only afterwards, so that it does not wait for its receipts. Raises
        `ForetokenError`.
        """
        signer = cls.of(service)
        if signer is not None and not signer._model_digest:
            await signer._hash_model()

    async def _hash_model(self) -> None:
        if self._hashing is None:
            job = asyncio.to_thread(digest_of, self._service.llm.built.path)
            self._hashing = asyncio.create_task(job, name="foretoken-receipts")
        hashing = self._hashing
        try:
            self._model_digest = await asyncio.shield(hashing)
        except ForetokenError:  # the next answer tries again
            if self._hashing is hashing:
                self._hashing = None
            raise

    def receipts(self, response_id: str, choices: Iterable[EndedChoice]) -> list[Receipt]:
        """Return a receipt for each choice that was not aborted."""
        return [
            sign(self._statement(response_id, each), self.keys.public.key_id, self.keys.private)
            for each in choices
            if each.finish_reason not in ("", "abort")
        ]

    def _statement(self, response_id: str, choice: EndedChoice) -> Statement:
        built, request = self._service.llm.built, choice.request
        sampling = request.sampling
        return Statement(
            version=VERSION,
            id=response_id,
            index=choice.number,
            created=int(time.time()),
            model=built.name,
            model_digest=self._model_digest,
            adapter=getattr(sampling.params, "lora", None) or adapter_name(),
            release=__version__,
            kernels=kernels_of(built.settings),
            options=engine_facts(built.settings),
            prompt_sha256=hash_of(request.tokens[: request.prompt_len]),
            sampling=plain_params(sampling.params),
            seed=sampling.seed,
            answer_sha256=hash_of(choice.token_ids),
            num_tokens=len(choice.token_ids),
            finish_reason=choice.finish_reason,
        )
