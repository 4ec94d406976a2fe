"""Models of the Hugging Face hub: downloads, and the contents of the cache.

A name is OWNER/NAME or OWNER/NAME@REVISION, with a branch, a tag or a commit.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
SHORT = 8  # minimum number of digits of an abbreviated commit


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A revision of a model in the cache. ``refs``: branches and tags that point to it."""

    name: str
    commit: str
    refs: tuple[str, ...]
    path: Path
    num_bytes: int
    num_files: int


def is_hub_id(name: str) -> bool:
    """Whether a name looks like a hub id, with or without a revision."""
    return name.partition("@")[0].count("/") == 1 and not name.startswith((".", "/", "~"))


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the id and the revision of a hub name; the revision None means the branch main."""
    hub_id, _, revision = name.partition("@")
    return hub_id, revision or None


def at_revision(model: str | None, revision: str | None) -> str | None:
    """Return the name of a model at a revision.

    Raises `InvalidRequest` for a model that is not from the hub.
    """
    if revision is None:
        return model
    if model is None or not is_hub_id(model) or Path(model).exists() or "@" in model:
        message = f"revision needs a hub model OWNER/NAME, not {model or 'the default model'}"
        raise InvalidRequest(message, param="revision")
    return f"{model}@{revision}"


def go_offline() -> None:
    """Use only cached models, in this process and its children."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # huggingface_hub has already read the variable
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def download(name: str) -> Path:
    """Return the folder of a model in the cache, after downloading it if necessary.

    Raises `ModelLoadError` with the reason and a remedy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub_id, revision = split_revision(name)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*WANTED]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        message = (
            f"{name} is not a local folder and could not be downloaded from the hub: "
            f"{_cause(error)}"
        )
        is_lasting = isinstance(
            error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError
        )
        raise ModelLoadError(message, may_pass=not is_lasting) from error


def _cause(error: Exception) -> str:
    """Return why the hub did not provide a model, and a remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "it is gated: accept its licence on its page, and set HF_TOKEN to your token"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "the hub has no such model; for a private one set HF_TOKEN to a token with read access"
        )
    if isinstance(error, RevisionNotFoundError):
        return "the model has no such revision"
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the model is not in the cache"
    reason = str(error).strip().partition("\n")[0].removeprefix("Got: ")
    if reason.startswith("ConnectError"):
        return f"{constants.ENDPOINT} cannot be reached ({reason.partition(': ')[2]})"
    return reason


# -- the cache ------------------------------------------------------------------------------------


def cached_models(hub_id: str | None = None) -> list[CachedModel]:
    """Return the cached revisions of all models, or of one model, sorted by name."""
    found = [
        CachedModel(
            name=repo.repo_id,
            commit=revision.commit_hash,
            refs=tuple(sorted(revision.refs)),
            path=revision.snapshot_path,
            num_bytes=revision.size_on_disk,
            num_files=revision.nb_files,
        )
        for repo in _repos()
        for revision in repo.revisions
        if hub_id in (None, repo.repo_id)
    ]
    return sorted(found, key=lambda each: (each.name, each.commit))


def find_cached(name: str) -> list[CachedModel]:
    """Return the cached revisions that a name matches; all of a model if the name has no revision.

    A commit may be abbreviated to `SHORT` digits. Raises `ModelLoadError` if there is no match.
    """
    hub_id, revision = split_revision(name)
    found = [
        each
        for each in cached_models(hub_id)
        if revision is None or revision in each.refs or _begins(each.commit, revision)
    ]
    if not found:
        raise ModelLoadError(f"{name} is not in the cache: download it with foretoken pull {name}")
    return found


def _begins(commit: str, digits: str) -> bool:
    return len(digits) >= SHORT and commit.startswith(digits)


def remove(name: str) -> int:
    """Delete the matching revisions from the cache. Return the number of bytes freed.

    Files shared with other revisions stay. Raises the errors of `find_cached`.
    """
    from huggingface_hub import scan_cache_dir

    commits = [each.commit for each in find_cached(name)]
    strategy = scan_cache_dir(_folder()).delete_revisions(*commits)
    freed = strategy.expected_freed_size
    strategy.execute()
    return freed


def _repos() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [each for each in scan_cache_dir(_folder()).repos if each.repo_type == "model"]
    except CacheNotFound:
        return []


def _folder() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
