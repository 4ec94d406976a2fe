"""The greeting of a replica: its model as a `Hello`, and that again as the model of a front."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ...._version import __version__
from ...build.built import Built
from ...runtime.serving_engine import ServingEngine
from .forms import defaults_form, defaults_of, pooling_form, pooling_of
from .messages import VERSION, Hello, body_form, body_of

EngineT = TypeVar("EngineT", bound=ServingEngine)


def hello_of(built: Built[ServingEngine], *, kernels: str, tokenizer: str, pid: int) -> Hello:
    """The greeting of a replica with this engine."""
    engine = built.engine
    return Hello(
        version=VERSION,
        release=__version__,
        pid=pid,
        kernels=kernels,
        tokenizer=tokenizer,
        fingerprint=built.fingerprint,
        name=built.name,
        aliases=sorted(built.aliases),
        model_path=built.model_path,
        vocab_size=built.vocab_size,
        max_model_len=built.max_model_len,
        eos_token_ids=sorted(built.eos_token_ids),
        exact=built.exact,
        drafters=list(built.drafters),
        no_self_draft=built.no_self_draft,
        sampling_defaults=defaults_form(built.sampling_defaults),
        pooling=pooling_form(built.pooling),
        takes_images=built.takes_images,
        settings=body_form(dict(built.settings)),
        max_running=engine.limits.max_running,
        max_queued=engine.limits.max_queued,
        page_size=engine.page_size,
        num_pages=engine.num_pages,
    )


def built_of(hello: Hello, engine: EngineT, path: Path) -> Built[EngineT]:
    """The model as a front's API knows it; its tokenizer and template are at ``path``.

    Raises `WireError`.
    """
    return Built(
        engine=engine,
        path=path,
        name=hello.name,
        aliases=frozenset(hello.aliases),
        vocab_size=hello.vocab_size,
        max_model_len=hello.max_model_len,
        eos_token_ids=frozenset(hello.eos_token_ids),
        exact=hello.exact,
        drafters=tuple(hello.drafters),
        no_self_draft=hello.no_self_draft,
        model_path=hello.model_path,
        sampling_defaults=defaults_of(hello.sampling_defaults),
        pooling=pooling_of(hello.pooling),
        takes_images=hello.takes_images,
        settings=body_of(hello.settings),
        fingerprint=hello.fingerprint,
        kernels=hello.kernels,
    )
