"""Folders of tiny models that see images, with tokenizers, chat templates and image processors."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from foretoken.core.config import EngineConfig
from support.checkpoints import save
from support.image_models import GRIDS, MUTUAL, PATCH, ROWS, SIDE, TYPE_IDS, image_model

FAKE, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
BEGIN, END, SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"  # Gemma's
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", IMAGE, FAKE, WHOLE,
    *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
    "<img>", "</img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
]  # fmt: skip
ROW = {"gemma3": SOFT}  # the token of each row, of kinds whose templates write another
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""Like SmolVLM's: content must be a list of parts, else it is not written."""
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 36 * PATCH**2},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
    },
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": PATCH,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 140,
    },
    "qwen2_5_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
    },
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "max_patches": 4,
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 3 * SIDE},
        "patch_size": PATCH,
    },
}
_NOT_READ = ("rows", "cols", "num_patches", "num_crops", "num_soft_tokens_per_image")
TEXTS = ["User: what is in the picture?\nAssistant: a bear, a bat and a hedgehog.\n"] * 8


def write_image_folder(folder: Path, model_type: str = "smolvlm") -> tuple[Any, Any]:
    """A servable folder; returns its model and its tokenizer."""
    special = [*SPECIAL, *((BEGIN, END, SOFT) if model_type in MUTUAL else ())]
    tokenizer = _tokenizer(special)
    template = TEMPLATE.replace(IMAGE, BEGIN) if model_type in ROW else TEMPLATE
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end_of_utterance>", chat_template=template
    )
    hf.add_special_tokens({"additional_special_tokens": special})
    model = image_model(
        model_type,
        vocab_size=len(hf),
        image=hf.convert_tokens_to_ids(ROW.get(model_type, IMAGE)),
        whole=_boundaries(hf, model_type),
    )
    save(model, folder)
    hf.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[model_type]))
    return model, hf


def _boundaries(tokenizer: Any, model_type: str) -> dict[str, int]:
    """Fields of a config: the tokens around the rows of Gemma's images."""
    if model_type not in MUTUAL:
        return {}
    ending = "index" if model_type == "gemma3" else "id"
    begin, end = tokenizer.convert_tokens_to_ids([BEGIN, END])
    return {f"boi_token_{ending}": begin, f"eoi_token_{ending}": end}


def _tokenizer(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def tiny_config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"draft": "none", "threads": 1, "kv_tokens": 4096} | options)


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(image: Image.Image, form: str = "PNG") -> str:
    held = BytesIO()
    image.save(held, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(held.getvalue()).decode()}"


def image_part(image: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image), **more}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def processed(folder: Path, model_type: str, images: list[Image.Image], **options: Any) -> Any:
    """The output of transformers' image processor for all images of one prompt at once."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if model_type == "smolvlm":
        return processor([images], return_row_col_info=True, return_tensors="pt", **options)
    if model_type == "internvl":
        options |= {"crop_to_patches": True}
    if model_type == "mistral3":
        options |= {"patch_size": 2 * PATCH}
    return processor(images=images, return_tensors="pt", **options)


def placeholder(model_type: str, made: Any, index: int) -> str:
    """The text of an image by transformers' processor, whose class needs packages for videos."""
    if model_type == "smolvlm":
        processor = SimpleNamespace(
            image_seq_len=4, fake_image_token=FAKE, image_token=IMAGE, global_image_tag=WHOLE
        )
        return Idefics3Processor.replace_image_token(processor, made, index)
    if model_type == "llava":
        processor = SimpleNamespace(
            patch_size=PATCH,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
            image_token=IMAGE,
        )
        return LlavaProcessor.replace_image_token(processor, made, index)
    if model_type == "internvl":
        processor = SimpleNamespace(
            start_image_token="<img>",
            end_image_token="</img>",
            image_token=IMAGE,
            image_seq_length=4,
        )
        return InternVLProcessor.replace_image_token(processor, made, index)
    if model_type == "gemma3":
        one = f"\n\n{BEGIN}{SOFT * ROWS['gemma3']}{END}\n\n"
        return Gemma3Processor.replace_image_token(
            SimpleNamespace(full_image_sequence=one), made, index
        )
    if model_type == "gemma4":
        processor = SimpleNamespace(boi_token=BEGIN, image_token=IMAGE, eoi_token=END)
        return Gemma4Processor.replace_image_token(processor, made, index)
    if model_type in GRIDS:
        processor = SimpleNamespace(
            image_processor=SimpleNamespace(merge_size=2), image_token=IMAGE
        )
        return Qwen2VLProcessor.replace_image_token(processor, made, index)
    height, width = (int(each) // (2 * PATCH) for each in made["image_sizes"][index])
    line = IMAGE * width  # PixtralProcessor is not to be had without torchvision
    return "[IMG_BREAK]".join([line] * height) + "[IMG_END]"


def answer(
    folder: Path,
    model_type: str,
    model: Any,
    tokenizer: Any,
    text: str,
    images: list[Image.Image],
    num_new: int,
    **options: Any,
) -> tuple[list[int], list[int]]:
    """Prompt and greedy answer of transformers for a rendered text with ``<image>`` in it."""
    made = processed(folder, model_type, images, **options) if images else {}
    pieces = text.split(IMAGE)
    whole = pieces[0]
    for index, piece in enumerate(pieces[1:]):
        whole += placeholder(model_type, made, index) + piece
    ids = torch.tensor([tokenizer(whole, add_special_tokens=False).input_ids])
    given = {name: each for name, each in made.items() if name not in _NOT_READ}
    if model_type in TYPE_IDS and images:
        row = tokenizer.convert_tokens_to_ids(ROW.get(model_type, IMAGE))
        given[TYPE_IDS[model_type]] = (ids == row).int()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()
