"""``foretoken calibrate``: measure a model's queries for ``--kv-evict triattention:N``."""

from __future__ import annotations

import json
from pathlib import Path

from ...core.errors import ForetokenError, InvalidRequest
from ...core.execution.packing.calibration import measure_queries
from ...core.execution.packing.triattention import QueryStats
from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ..build.model_files import find_model
from ..text.tokenizer_cache import load_tokenizer
from .outputs import check_out
from .terminal.progress import Progress

MAX_TOKENS = 1 << 16  # maximum number of tokens of all texts
TEXT_TOKENS = 4096  # maximum number of tokens of one text


def calibrate(model: str | None, data: Path, out: Path) -> int:
    """Measure a model's queries, write the statistics to ``out`` and print a summary.

    Returns the exit status. Raises `InvalidRequest` for data without text, an unwritable file and
    an unsupported model, `ForetokenError` if writing fails, and the errors of loading the model.
    """
    check_out(out)
    texts = read_texts(data)
    source = find_model(model)
    decoder = load_decoder(source.path, dtype="float32", backend="auto")
    if not isinstance(decoder, OwnDecoder):
        raise InvalidRequest(f"{source.name} needs transformers' modules", param="model")
    longest = min(TEXT_TOKENS, decoder.config.max_model_len)
    encode = load_tokenizer(source.path).backend_tokenizer.encode
    tokens = cut([encode(text, add_special_tokens=False).ids for text in texts], longest)
    num_tokens = sum(map(len, tokens))
    progress = Progress(f"{num_tokens} tokens of {data}")
    try:
        stats = measure_queries(decoder, tokens, lambda done: progress.note(done / num_tokens))
    except ValueError as error:
        raise InvalidRequest(f"{source.name}: {error}", param="model") from None
    try:
        stats.save(out)
    except OSError as error:  # for example a full disk
        raise ForetokenError(f"{out}: {error.strerror}") from None
    print(f"{out}: query statistics of {source.name} over {num_tokens} tokens")
    print(f"concentration |E q| / E |q|, by layer: {shares(stats)}")
    return 0


def shares(stats: QueryStats) -> str:
    """Return the concentration of each layer's queries, from 0 to 1, as text."""
    found = (stats.mean.abs() / stats.mean_abs.clamp_min(1e-12)).mean(dim=(1, 2))
    return " ".join(f"{each:.2f}" for each in found.tolist())


def read_texts(data: Path) -> list[str]:
    """Return a text file as one text, or the ``text`` of each line of a JSON Lines file.

    Raises `InvalidRequest`, which names the problem.
    """
    try:
        whole = data.read_text(encoding="utf-8")
        if data.suffix != ".jsonl":
            return [whole]
        return [str(json.loads(line)["text"]) for line in whole.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"data: {data}: {error!r}", param="data") from None


def cut(texts: list[list[int]], longest: int) -> list[list[int]]:
    """Split texts into pieces of at most ``longest`` tokens, up to `MAX_TOKENS` in total."""
    left, found = MAX_TOKENS, list[list[int]]()
    for text in texts:
        for start in range(0, len(text), longest):
            piece = text[start : start + min(longest, left)]
            left -= len(piece)
            found += [piece] if piece else []
    return found
