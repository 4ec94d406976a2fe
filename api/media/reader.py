"""ImageReader: decodes images and computes the inputs of the model's image tower."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.config import EngineConfig
from ...core.errors import ForetokenError
from ...core.interface.extras.images import TowerInput, content_hash
from ...core.options.settings import parse_size
from ..text.executor import Worker
from ..types.request_context import origin
from .placeholders import RULES, ImageTokens, Placeholder
from .sources import Detail, ImageSource

logger = logging.getLogger(__name__)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 100  # the largest ratio of a picture's sides: processors enlarge the shorter side
SECONDS = 60.0  # the timeout for one image
# outputs of image processors that are not inputs of the image tower
_NOT_READ = ("rows", "cols", "num_patches", "num_crops", "num_soft_tokens_per_image")


class ReadImage(NamedTuple):
    """A decoded image: its text in a prompt, and the image tower's inputs with their hash."""

    placeholder: Placeholder
    inputs: tuple[TowerInput, ...]
    content: bytes

    @property
    def num_bytes(self) -> int:
        """Size of the inputs in bytes."""
        return sum(len(each.data) for each in self.inputs)


class ImageReader:
    """Reader of the images in requests for the model at ``path``. It has its own thread.

    The most recently read images are cached, up to ``--image-cache`` bytes.
    """

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.path, self._config = path, config
        self.max_images = config.max_images  # maximum number of images per request
        self._media_dir = None if config.media_dir is None else Path(config.media_dir).expanduser()
        self._cache_bytes = parse_size(config.image_cache)
        self._worker = Worker("foretoken-images")
        self._kept: OrderedDict[str, ReadImage] = OrderedDict()
        self._num_bytes = 0

    def close(self) -> None:
        """Refuse the images that are still waiting to be read."""
        self._worker.close()

    async def read(
        self, sources: Sequence[ImageSource], tokens: ImageTokens
    ) -> dict[str, ReadImage]:
        """Read images, and return them by the digests of their sources.

        ``tokens``: the model's image tokens. Raises `InvalidRequest`, which names the first image
        that cannot be served, and `QueueFull`.
        """
        if len(sources) > (most := self.max_images):
            raise sources[most].refusal(f"more than {most} images (the server's --max-images)")
        found: dict[str, ReadImage] = {}
        # one job per image, so that other requests' images can run in between
        for source in sources:
            if source.digest not in found:
                job = partial(self._read, source, tokens)
                try:
                    read = await self._worker.run(job, seconds=SECONDS, origin=origin())
                except TimeoutError:
                    raise source.refusal("the image took too long to decode") from None
                found[source.digest] = read
        return found

    # -- in the thread --------------------------------------------------------------------------

    def _read(self, source: ImageSource, tokens: ImageTokens) -> ReadImage:
        is_fixed = source.url.startswith("data:")  # files may change, so they are not cached
        if is_fixed and source.digest in self._kept:
            self._kept.move_to_end(source.digest)
            return self._kept[source.digest]
        try:
            image = self._decoded(source, source.read(self._media_dir))
            read = self.process(image, tokens, source.detail)
        except ForetokenError:
            raise
        except Exception as error:  # a damaged picture may make a processor raise anything
            logger.warning("an image could not be processed", exc_info=error)
            raise source.refusal("the image cannot be processed") from error
        if is_fixed and read.num_bytes <= self._cache_bytes:
            self._keep(source.digest, read)
        return read

    def _keep(self, digest: str, read: ReadImage) -> None:
        self._kept[digest] = read
        self._num_bytes += read.num_bytes
        while self._num_bytes > self._cache_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def process(self, image: Any, tokens: ImageTokens, detail: Detail) -> ReadImage:  # noqa: ANN401
        """Return the placeholder and the image tower's inputs for an RGB picture.

        Raises any exception that the image processor raises.
        """
        rules = RULES[self._model["model_type"]]
        options = rules.options(self._model)
        if detail == "low":
            options |= rules.low or {}
            if rules.low_side is not None:
                image.thumbnail((rules.low_side, rules.low_side))
        made = self._processor(images=[image], return_tensors="np", **options)
        arrays = {name: np.asarray(value) for name, value in made.items()}
        inputs = tuple(
            _tower_input(name, each) for name, each in arrays.items() if name not in _NOT_READ
        )
        return ReadImage(rules.write(self._model, tokens, arrays), inputs, content_hash(inputs))

    def _decoded(self, source: ImageSource, data: bytes) -> Any:  # noqa: ANN401 - Pillow's
        """Return the picture in RGB, upright; its size is checked before its pixels are decoded."""
        try:
            from PIL import Image, ImageOps
        except ImportError:
            extra = "the server lacks Pillow: pip install 'foretoken[images]'"
            raise source.refusal(extra) from None
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise source.refusal(self._too_large) from None
        except Exception as error:
            known = f"send {', '.join(FORMATS)}"
            raise source.refusal(f"the image has an unsupported format: {known}") from error
        width, height = image.size
        if width * height > self._config.max_image_pixels:
            raise source.refusal(f"{width} x {height} pixels: {self._too_large}")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise source.refusal(f"one side is more than {MAX_RATIO} times as long as the other")
        if getattr(image, "is_animated", False):
            logger.info("only the first frame of an animated image is used")
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            raise source.refusal("the image is damaged") from error

    @property
    def token_id(self) -> int | None:
        """The id of the image token; None if the config does not name one."""
        return _token_id(self._written, "image")

    def tokens(self, text_of: Callable[[int], str]) -> ImageTokens | None:
        """Return the texts of the image tokens that the config names; None if it names none.

        ``text_of`` returns the text of a token id.
        """
        values = self._written
        row, begin, end = (
            "" if (token_id := _token_id(values, kind)) is None else text_of(token_id)
            for kind in ("image", "boi", "eoi")
        )
        rules = RULES.get(values.get("model_type", ""))
        place = begin if rules is not None and rules.is_begun else row
        return ImageTokens(row, place, begin, end) if row and place else None

    @cached_property
    def _written(self) -> dict[str, Any]:
        """The contents of the model's ``config.json``."""
        found: dict[str, Any] = msgspec.json.decode((self.path / "config.json").read_bytes())
        return found

    @property
    def _too_large(self) -> str:
        most = self._config.max_image_pixels
        return f"an image may have at most {most} pixels (the server's --max-image-pixels)"

    @cached_property
    def _model(self) -> Mapping[str, Any]:
        """The model's config with the defaults of its class."""
        from ...core.model.fallback.text_config import read_whole_config

        found: dict[str, Any] = read_whole_config(self.path).to_dict()
        return found

    @cached_property
    def _processor(self) -> Any:  # noqa: ANN401 - transformers is untyped
        """The image processor of transformers, in the variant that does not need torchvision."""
        from transformers import AutoImageProcessor

        from ...core.model.fallback.text_config import quiet

        with quiet():
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self.path, backend="pil", local_files_only=True, trust_remote_code=False
            )


def count_rows(path: Path, side: int) -> int | None:
    """Return the number of tokens of a square image with sides of ``side`` pixels.

    None if Pillow or the model's image processor is missing.
    """
    try:
        from PIL import Image

        reader = ImageReader(path, EngineConfig())
        blank, tokens = Image.new("RGB", (side, side)), ImageTokens("", "")
        return reader.process(blank, tokens, "auto").placeholder.num_rows
    except Exception as error:
        logger.debug("the tokens of an image are not known", exc_info=error)
        return None


def _tower_input(name: str, values: NDArray[Any]) -> TowerInput:
    kind = "float32" if values.dtype.kind == "f" else "int64"
    stored = np.ascontiguousarray(values, np.dtype(kind).newbyteorder("<"))
    return TowerInput(name, kind, stored.shape, stored.tobytes())  # type: ignore[arg-type]


def _token_id(values: Mapping[str, Any], kind: str) -> int | None:
    found = values.get(f"{kind}_token_id", values.get(f"{kind}_token_index"))
    return found if isinstance(found, int) else None
