"""The served model in Ollama's form: GET /api/tags, /api/ps, /api/version, POST /api/show."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ...._version import __version__
from ...serving.decoding import decoder
from ...serving.dialect import READS, Endpoints, get, post
from ...serving.errors import JsonResponse
from ...serving.serving_context import Service
from . import answers
from .bodies import OllamaShowBody
from .writing import now

if TYPE_CHECKING:
    from ....core.model.report import ModelReport

API_VERSION = "0.12.6"  # version of Ollama; some clients reject servers with a lower one
LATEST = ":latest"
decode_show = decoder(OllamaShowBody)


def own_name(service: Service, name: str | None) -> str | None:
    """Return the name without the tag ":latest", which Ollama's clients add."""
    if name is None or name in service.names:
        return name
    return name.removesuffix(LATEST)


class OllamaModels(Endpoints):
    """The routes that describe the model. The model's files are read once, in a thread."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._report: ModelReport | None = None
        self._files = 0, ""  # size of the weights in bytes; modification time, in ISO format

    @get("/api/tags", answers.TagList)
    async def tags(self, _request: Request) -> Response:
        """Return the model under each of its names."""
        await self._read()
        return JsonResponse(answers.TagList(models=[self._tag(n) for n in self.service.names]))

    @get("/api/ps", answers.TagList)
    async def running(self, _request: Request) -> Response:
        """Return the loaded models: the served model, under each of its names."""
        await self._read()
        tags = [self._tag(name) for name in self.service.names]
        for tag in tags:
            tag.expires_at, tag.size_vram = "0001-01-01T00:00:00Z", tag.size
        return JsonResponse(answers.TagList(models=tags))

    @get("/api/version", answers.OllamaVersion)
    async def version(self, _request: Request) -> Response:
        """Return the version of Ollama whose API is implemented, and foretoken's version."""
        return JsonResponse(answers.OllamaVersion(version=API_VERSION, foretoken=__version__))

    @post("/api/show", answers.Shown, body=OllamaShowBody, errors=READS)
    async def show(self, request: Request) -> Response:
        """Return format, size, template and capabilities of the model."""
        body = await self.service.read(request, decode_show)
        self.service.check_model(own_name(self.service, body.model or body.name))
        await self._read()
        service, built = self.service, self.service.llm.built
        family, defaults = self._details.family, built.sampling_defaults.in_force
        return JsonResponse(
            answers.Shown(
                modelfile=f"FROM {service.model}\n",
                parameters="\n".join(f"{name} {value:g}" for name, value in defaults.items()),
                template=service.llm.tokenizer.chat_template or "{{ .Prompt }}",
                details=self._details,
                model_info={
                    "general.architecture": family,
                    "general.parameter_count": self._num_parameters,
                    f"{family}.context_length": built.max_model_len,
                    "tokenizer.ggml.eos_token_ids": sorted(built.eos_token_ids),
                },
                capabilities=self._capabilities,
                modified_at=self._files[1],
            )
        )

    @property
    def _num_parameters(self) -> int:
        return 0 if self._report is None else self._report.num_parameters

    @property
    def _capabilities(self) -> list[str]:
        """Ollama's names of the model's capabilities, by which clients select a model."""
        syntax, built = self.service.chat.syntax, self.service.llm.built
        tokenizer = self.service.llm.tokenizer
        has = {
            "tools": syntax.has_tools and bool(tokenizer.chat_template),
            "vision": built.takes_images,
            "thinking": syntax.thought_marks is not None,
            "embedding": built.pooling.embeds,
        }
        return ["completion", *(name for name, is_there in has.items() if is_there)]

    @cached_property
    def _details(self) -> answers.Details:
        report = self._report
        family = (report.model_type if report is not None else "") or "unknown"
        quantization = report.quantization or report.dtype if report is not None else ""
        return answers.Details(
            format="gguf" if report is not None and report.file_format == "GGUF" else "safetensors",
            family=family,
            families=[family],
            parameter_size=_size(self._num_parameters),
            quantization_level=quantization or "unknown",
        )

    def _tag(self, name: str) -> answers.Tag:
        size, modified = self._files
        digest = hashlib.sha256(f"{self.service.llm.built.path.name} {size} {modified}".encode())
        return answers.Tag(
            name=name, model=name, modified_at=modified, size=size, digest=digest.hexdigest(),
            details=self._details,
        )  # fmt: skip

    async def _read(self) -> None:
        if not self._files[1]:
            self._report, self._files = await asyncio.to_thread(self._inspect)

    def _inspect(self) -> tuple[ModelReport | None, tuple[int, str]]:
        """Return a report of the model, the size of its weights and its modification time.

        A front, which passes requests on to replicas, may not have the files. Without them, the
        report is None, the size is 0 bytes, and the time is the present one.
        """
        from ....core.model.report import inspect_model, weight_files  # imports torch

        path = self.service.llm.built.path
        if not path.exists():
            return None, (0, now())
        modified = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return inspect_model(path), (weight_files(path)[1], modified.isoformat())


def _size(num_parameters: int) -> str:
    """Return a number of parameters in Ollama's form: 135M, 8.0B."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.0f}M"
