"""ReceiptSigner: signs the answers of a server that is started with ``--receipts``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from ..._version import __version__
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

    @cached_property
    def _model_digest(self) -> str:
        """Digest of the model's files. The first answer waits until all of them are read."""
        return digest_of(self._service.llm.built.path)
