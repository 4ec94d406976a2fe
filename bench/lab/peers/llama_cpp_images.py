"""Pictures for llama.cpp's worker, by its own ``mtmd``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from llama_cpp import mtmd_cpp as mtmd

_MARKER = b"<__media__>"
_BATCH = 512


class Images:
    """An image tower beside a model, both as llama.cpp loads them.

    Its preprocessor makes tiles of a picture and the whole of it besides. One tile is the whole,
    so the first of them alone is computed, as the other engines do.
    """

    def __init__(self, tower: Path, model: Any, threads: int) -> None:  # noqa: ANN401 - a handle
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.n_threads = False, False, threads
        params.media_marker = _MARKER
        self._context: Any = mtmd.mtmd_init_from_file(bytes(tower), model, params)
        if not self._context:
            raise SystemExit(f"{tower}: llama.cpp does not load it")

    def compute(self, path: str, model_context: Any, start: int) -> int:  # noqa: ANN401 - a handle
        """Compute a picture as positions from ``start`` on of sequence 0; the position behind."""
        bitmap = mtmd.mtmd_helper_bitmap_init_from_file(self._context, path.encode(), False)
        chunks: Any = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            code = mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1)
            if code != 0:
                raise RuntimeError(f"mtmd_tokenize returned {code}")
            return self._decode(_first_image(chunks), model_context, start)
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _decode(self, chunk: Any, model_context: Any, start: int) -> int:  # noqa: ANN401 - handles
        behind = ctypes.c_int32(0)
        code = mtmd.mtmd_helper_eval_chunk_single(
            self._context, model_context, chunk, start, 0, _BATCH, False, ctypes.byref(behind)
        )
        if code != 0:
            raise RuntimeError(f"mtmd_helper_eval_chunk_single returned {code}")
        return behind.value


def _first_image(chunks: Any) -> Any:  # noqa: ANN401 - handles
    for index in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, index)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            return chunk
    raise RuntimeError("mtmd_tokenize found no image")
