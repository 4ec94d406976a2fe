"""SeenImages: a conversation's images, from placeholders in messages to rows of image tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ....core.errors import InvalidRequest
from ....core.interface.extras.images import PromptImage, image_key
from ...media.placeholders import ImageTokens
from ...media.reader import ImageReader, ReadImage
from ...media.sources import ImageSource, join_parts, split_marks, template_parts
from ...text.tokenizer import Tokenizer
from .chat_input import ChatInput
from .left_out import tell_left_out

Messages = Sequence[Mapping[str, Any]]
Parts = list[str | ImageSource]  # parts of a message


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The images of a conversation, in the order of their placeholders.

    ``place``: the text that stands for an image in a rendered conversation. ``token_id``: the id of
    the token that stands for each row of an image.
    """

    images: Sequence[ReadImage] = ()
    sources: Mapping[str, ImageSource] = field(default_factory=dict)
    place: str = ""
    token_id: int = -1

    def messages(self, messages: Messages, *, in_parts: bool) -> Messages:
        """Return the messages with placeholders converted to image parts, as chat templates expect
        them.

        ``in_parts``: convert all texts to lists of parts.
        """
        if not self.images and not in_parts:
            return messages
        return [self._message(message, in_parts=in_parts) for message in messages]

    def _message(self, message: Mapping[str, Any], *, in_parts: bool) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        parts = split_marks(content, self.sources)
        if not in_parts and not any(isinstance(part, ImageSource) for part in parts):
            return message
        return {**message, "content": template_parts(parts)}

    def expanded(self, text: str) -> str:
        """Return a rendered conversation with each ``place`` replaced by the text of its image.

        Raises `InvalidRequest` if ``place`` does not occur exactly once for each image.
        """
        if not self.images:
            return text
        pieces = text.split(self.place)
        if len(pieces) != len(self.images) + 1:
            raise InvalidRequest(
                f"the prompt contains {self.place} {len(pieces) - 1} times for {len(self.images)} "
                "images: message texts must not contain it, and the chat template must "
                "render each image",
                param="messages",
            )
        written = (image.placeholder.text for image in self.images)
        return "".join([pieces[0], *(a + b for a, b in zip(written, pieces[1:], strict=True))])

    def placed(self, token_ids: Sequence[int], salt: str | None) -> tuple[PromptImage, ...]:
        """Return the images with their positions in the prompt.

        Raises `InvalidRequest` if the number of image tokens differs from the number of image rows.
        """
        if not self.images:
            return ()
        places = [at for at, token_id in enumerate(token_ids) if token_id == self.token_id]
        if len(places) != sum(image.placeholder.num_rows for image in self.images):
            message = (
                "the number of image tokens in the prompt differs from the number of "
                "image rows: message "
                "texts must not contain image tokens, and the tokenizer must encode each "
                "as one token"
            )
            raise InvalidRequest(message, param="messages")
        found, begin = [], 0
        for image in self.images:
            end = begin + image.placeholder.num_rows
            key = image_key(salt, image.content)
            runs = _runs(places[begin:end])
            written = image.placeholder
            found.append(PromptImage(key, runs, image.inputs, written.grid, written.is_mutual))
            begin = end
        return tuple(found)


NO_IMAGES = SeenImages()
UNSEEN = "[an image that this model cannot see]"


async def with_results_seen(
    chat: ChatInput, reader: ImageReader | None, tokenizer: Tokenizer
) -> ChatInput:
    """Replace images from tools and the model by a text if they cannot be served.

    Return the changed conversation. Agents send such images again with every request, so an error
    would recur. If there are more images than a request may have, the oldest images from tools and
    the model are replaced, too. Raises `QueueFull`.
    """
    sources = {source.digest: source for source in chat.images}
    left = iter(chat.images)
    all_parts: dict[int, Parts] = {}  # parts of each message, by its index
    for at, message in enumerate(chat.messages):
        if isinstance(content := message.get("content"), str):
            split = split_marks(content, sources)
            parts = [each if isinstance(each, str) else next(left) for each in split]
            if _is_returned(message):
                parts = [await _served(each, reader, tokenizer) for each in parts]
            all_parts[at] = parts
    num_images = sum(isinstance(part, ImageSource) for part in chain(*all_parts.values()))
    num_left_out = 0 if reader is None else _num_beyond(num_images, reader.max_images)
    messages, images = [*chat.messages], []
    for at, parts in all_parts.items():
        if _is_returned(messages[at]):
            num_left_out = _leave_out(parts, num_left_out)
            if UNSEEN in parts:
                tell_left_out("images in results of tools and in answers")
            messages[at] = {**messages[at], "content": join_parts(parts).text}
        images += [part for part in parts if isinstance(part, ImageSource)]
    return replace(chat, messages=messages, images=images)


def _num_beyond(num_images: int, most: int) -> int:
    """Return how many of the oldest images from tools and the model to replace by a text.

    The number grows in steps of ``most`` / 2, so the prompt prefix and its cache hit stay unchanged
    for several turns.
    """
    step = max(1, most // 2)
    return -(-max(0, num_images - most) // step) * step


def _leave_out(parts: Parts, most: int) -> int:
    """Replace up to ``most`` images of a message. Return ``most`` minus the number replaced."""
    for at, part in enumerate(parts):
        if most > 0 and isinstance(part, ImageSource):
            parts[at], most = UNSEEN, most - 1
    return most


def _is_returned(message: Mapping[str, Any]) -> bool:
    """Whether a message comes from a tool or the model."""
    return message.get("role") in ("tool", "assistant")


async def _served(
    part: str | ImageSource, reader: ImageReader | None, tokenizer: Tokenizer
) -> str | ImageSource:
    """Return the part, or a text in place of an image that cannot be served."""
    if isinstance(part, str):
        return part
    tokens = None if reader is None else _tokens(reader, tokenizer)
    if reader is None or tokens is None:
        return UNSEEN
    try:
        await reader.read([part], tokens)
    except InvalidRequest:
        return UNSEEN
    return part


def _tokens(reader: ImageReader, tokenizer: Tokenizer) -> ImageTokens | None:
    """Return the texts of the model's image tokens; None if its files define none."""
    if reader.token_id is None:
        return None
    return reader.tokens(lambda each: tokenizer.decode([each], skip_special_tokens=False))


async def see(chat: ChatInput, reader: ImageReader | None, tokenizer: Tokenizer) -> SeenImages:
    """Read the images of a conversation.

    ``reader``: None if images are not supported. Raises `QueueFull`, and `InvalidRequest`, which
    names the first image that cannot be served.
    """
    if not chat.images:
        return NO_IMAGES
    if reader is None:
        raise chat.images[0].refusal("the model does not support images")
    tokens = _tokens(reader, tokenizer)
    if reader.token_id is None or tokens is None:
        raise chat.images[0].refusal("the model's files do not define an image token")
    sources = {source.digest: source for source in chat.images}
    order = [
        part
        for message in chat.messages
        if isinstance(content := message.get("content"), str)
        for part in split_marks(content, sources)
        if isinstance(part, ImageSource)
    ]
    read = await reader.read(chat.images, tokens)
    images = [read[each.digest] for each in order]
    return SeenImages(images, sources, tokens.place, reader.token_id)


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive positions, each as its first position and its length."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return tuple(runs)
