"""The text that stands for an image in a prompt, for each kind of model.

transformers' processors also write this text, but they need packages for videos. Therefore their
rules are repeated here; tests compare the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
_LOW_SIDE = 512  # maximum length in pixels of the longer side of a picture with detail "low"


class ImageTokens(NamedTuple):
    """The texts of a model's image tokens.

    ``row`` stands for one row of an image. ``place`` is the text that chat templates write for an
    image. ``begin`` and ``end`` surround its rows; they are "" if the model has none.
    """

    row: str
    place: str
    begin: str = ""
    end: str = ""


class Placeholder(NamedTuple):
    """The text of an image, with ``num_rows`` image tokens.

    ``grid`` is the number of lines and columns of tokens, for models whose RoPE positions are
    two-dimensional. ``is_mutual``: whether the image's tokens attend to each other bidirectionally.
    """

    text: str
    num_rows: int
    grid: tuple[int, int] | None = None
    is_mutual: bool = False


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules by which images are represented in the prompts of one kind of model.

    ``write`` returns the placeholder, given the model's config, its image tokens, and the output of
    the image processor for one picture. ``options`` returns the options of the image processor,
    given the config; ``low`` are additional options for pictures with detail "low", and
    ``low_side`` limits their longer side, in pixels. ``is_begun``: whether chat templates write the
    token that begins an image, rather than the image token.
    """

    write: Callable[[Mapping[str, Any], ImageTokens, Arrays], Placeholder]
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    low: Mapping[str, Any] | None = None
    low_side: int | None = None
    is_begun: bool = False


def _side(value: Any) -> int:  # noqa: ANN401 - of JSON
    """Return the length of a side in pixels, given one number or a number for each side."""
    return int(value[0] if isinstance(value, list | tuple) else value)


def _num_patches(config: Mapping[str, Any], pixels: NDArray[Any]) -> int:
    """Return the number of patches of one tile."""
    patch = _side(config["vision_config"]["patch_size"])
    height, width = pixels.shape[-2:]
    return int(height // patch) * int(width // patch)


def _tiles(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for SmolVLM and Idefics 3: a grid of tiles, then the whole picture."""
    num = _num_patches(config, arrays["pixel_values"]) // int(config["scale_factor"]) ** 2
    rows, cols = (int(np.ravel(arrays[name])[0]) for name in ("rows", "cols"))
    fake = "<fake_token_around_image>"
    grid = "".join(
        "".join(f"{fake}<row_{row + 1}_col_{col + 1}>{tokens.row * num}" for col in range(cols))
        + "\n"
        for row in range(rows)
    )
    whole = f"{fake}<global-img>{tokens.row * num}{fake}"
    text = f"{grid}\n{whole}" if rows and cols else whole
    return Placeholder(text, num * (rows * cols + 1))


def _row(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for LLaVA: the patches of one square.

    CLIP's tower has one more vector (the class token), which the config may drop.
    """
    tower = config["vision_config"]["model_type"]
    if tower == "pixtral":
        return _lines(config, tokens, arrays)
    is_default = config.get("vision_feature_select_strategy", "default") == "default"
    num = _num_patches(config, arrays["pixel_values"])
    num += int(tower == "clip_vision_model") - int(is_default)
    return Placeholder(tokens.row * num, num)


def _lines(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for Mistral 3 and Pixtral: rows of patches with separators."""
    height, width = (int(each) // _merged(config) for each in np.ravel(arrays["image_sizes"])[:2])
    lines = [tokens.row * width] * height
    return Placeholder("[IMG_BREAK]".join(lines) + "[IMG_END]", height * width)


def _merged(config: Mapping[str, Any]) -> int:
    """Return the side in pixels of the square that becomes one row of the image."""
    return _side(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))


def _crops(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for InternVL: the rows of all tiles, one after another."""
    pixels = arrays["pixel_values"]
    share = float(config["downsample_ratio"]) ** 2
    num = len(pixels) * int(_num_patches(config, pixels) * share)
    return Placeholder(f"<img>{tokens.row * num}</img>", num)


def _patches(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for Qwen2-VL to Qwen3.5: a grid of merged patches."""
    merge = int(config["vision_config"]["spatial_merge_size"])
    _, height, width = (int(each) for each in np.ravel(arrays["image_grid_thw"]))
    grid = (height // merge, width // merge)
    num = grid[0] * grid[1]
    return Placeholder(tokens.row * num, num, grid)


def _soft(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for Gemma 3: a fixed number of rows per picture and per crop."""
    num = int(config["mm_tokens_per_image"])
    num_crops = int(np.ravel(arrays["num_crops"])[0])
    one = f"\n\n{tokens.begin}{tokens.row * num}{tokens.end}\n\n"
    crops = " ".join([one] * num_crops)
    whole = (
        f"Here is the original image {one} and here are some crops to help you see better {crops}"
    )
    return Placeholder(whole if num_crops else one, num * (1 + num_crops), is_mutual=True)


def _sized(config: Mapping[str, Any], tokens: ImageTokens, arrays: Arrays) -> Placeholder:
    """Return the placeholder for Gemma 4: the number of rows depends on the size of the picture."""
    num = int(np.ravel(arrays["num_soft_tokens_per_image"])[0])
    is_mutual = config["text_config"].get("use_bidirectional_attention") == "vision"
    text = f"{tokens.begin}{tokens.row * num}{tokens.end}"
    return Placeholder(text, num, is_mutual=is_mutual)


_QWEN = ImageRules(_patches, low_side=_LOW_SIDE)
_GRID = ImageRules(
    _tiles, lambda _: {"return_row_col_info": True}, low={"do_image_splitting": False}
)
RULES: Mapping[str, ImageRules] = {
    "gemma3": ImageRules(_soft, low={"do_pan_and_scan": False}, is_begun=True),
    "gemma4": ImageRules(_sized, low={"max_soft_tokens": 70}),
    "idefics3": _GRID,
    "internvl": ImageRules(
        _crops, lambda _: {"crop_to_patches": True}, low={"crop_to_patches": False}
    ),
    "llava": ImageRules(_row, low_side=_LOW_SIDE),
    "mistral3": ImageRules(
        _lines, lambda config: {"patch_size": _merged(config)}, low_side=_LOW_SIDE
    ),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": _GRID,
}
"""The rules by the ``model_type`` of a config."""
