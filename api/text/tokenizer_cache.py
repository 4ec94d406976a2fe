"""Tokenizers that are cached in files for later processes.

Importing transformers and converting the vocabulary of a GGUF file take seconds. The resulting
tokenizer, its chat template and the names of its special tokens are stored in the cache folder,
under a hash of everything that they depend on: the model's files, the versions of transformers and
tokenizers, and our conversion. A damaged file is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from ...core.ops.machine.cache_folder import cache_folder
from . import gguf_tokenizer
from .gguf_tokenizer import load_gguf_tokenizer, splits_as_named

logger = logging.getLogger(__name__)

GGUF = ".gguf"
SOURCES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")
"""Files in a folder that may affect its tokenizer; weights do not."""
_DIGEST_CHARS = 64
_NUM_KEPT = 32  # maximum number of files, a few megabytes each; the oldest are deleted


@dataclass(slots=True)
class LoadedTokenizer:
    """The parts of a tokenizer of transformers that are used here."""

    backend_tokenizer: Any  # from the library tokenizers, which has no type annotations
    chat_template: str | Mapping[str, str] | None
    special_tokens_map: Mapping[str, str]
    response_template: object = None  # JSON


class _Kept(msgspec.Struct, frozen=True):
    """The content of a cache file, which follows the checksum."""

    backend: str
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]
    response_template: Any = None


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Return the tokenizer of a folder or a GGUF file, from the cache if possible.

    Raises the errors of transformers, and `ModelLoadError` for an unreadable GGUF file.
    """
    file = _kept_file(_key(path))
    kept = None if file is None else _read(file)
    if kept is not None:
        return kept
    hf = _convert(path)
    special_tokens = {name: str(each) for name, each in hf.special_tokens_map.items()}
    backend = getattr(hf, "backend_tokenizer", None)
    template = getattr(hf, "chat_template", None) or _processor_template(path)
    loaded = LoadedTokenizer(backend, template, special_tokens, _response_template(path))
    if file is not None and backend is not None and _is_cacheable(path, backend):
        _write(file, loaded)
    return loaded


def _kept_file(key: str) -> Path | None:
    """Return the cache file of a tokenizer; None if the cache folder cannot be written."""
    try:
        return cache_folder() / "tokenizers" / f"{key}.json"
    except OSError as error:
        _log_why_not_cached(error)
        return None


def _log_why_not_cached(error: OSError) -> None:
    logger.info("cannot cache the tokenizer; it will be converted at every start: %s", error)


def _processor_template(path: Path) -> str | None:
    """Return the chat template in the processor's file, where older multimodal models store it."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    found = msgspec.json.decode(file.read_bytes())
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None


def _response_template(path: Path) -> object:
    """Return the JSON with which a model's files describe the model's answers; None without it."""
    try:
        found = msgspec.json.decode((path / "tokenizer_config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return found.get("response_template") if isinstance(found, dict) else None


def _convert(path: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    if path.suffix.lower() == GGUF:
        return load_gguf_tokenizer(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _is_cacheable(path: Path, backend: Any) -> bool:  # noqa: ANN401 - tokenizers is untyped
    """Whether a tokenizer may be cached.

    A tokenizer with a setting that the file would not store is not cached, nor one with an unknown
    pre-tokenizer, about which every start must warn.
    """
    is_known = path.suffix.lower() != GGUF or splits_as_named(backend, path)
    return is_known and not backend.encode_special_tokens


def _key(path: Path) -> str:
    digest = hashlib.sha256()
    for package in ("transformers", "tokenizers"):
        digest.update(f"{package} {importlib.metadata.version(package)}\0".encode())
    for module in (__file__, gguf_tokenizer.__file__):
        digest.update(Path(module).read_bytes() + b"\0")
    for name, content in _sources(path):
        digest.update(f"{name} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _sources(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file that a tokenizer depends on."""
    if path.suffix.lower() == GGUF:
        from ...core.model.formats.gguf_metadata import read_head

        yield GGUF, read_head(path)
        return
    for file in sorted(file for pattern in SOURCES for file in path.glob(pattern)):
        yield str(file.relative_to(path)), file.read_bytes()


def _read(file: Path) -> LoadedTokenizer | None:
    """Return a cached tokenizer; None if it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, payload = content[:_DIGEST_CHARS], content[_DIGEST_CHARS:]
    if digest != _checksum(payload):
        logger.warning("%s is damaged: converting the tokenizer again", file)
        return None
    kept = msgspec.json.decode(payload, type=_Kept)
    backend = Backend.from_str(kept.backend)
    return LoadedTokenizer(backend, kept.chat_template, kept.special_tokens, kept.response_template)


def _write(file: Path, loaded: LoadedTokenizer) -> None:
    """Write a tokenizer to a temporary file and rename it.

    Other processes thus never read an incomplete file.
    """
    template = loaded.chat_template
    if template is not None and not isinstance(template, str):
        template = dict(template)
    kept = _Kept(
        loaded.backend_tokenizer.to_str(),
        template,
        dict(loaded.special_tokens_map),
        loaded.response_template,
    )
    payload = msgspec.json.encode(kept)
    try:
        file.parent.mkdir(exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_bytes(_checksum(payload) + payload)
            written.replace(file)
        _drop_oldest(file.parent)
    except OSError as error:
        _log_why_not_cached(error)


def _drop_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process may delete the same files
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-_NUM_KEPT]:
            file.unlink()


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()
