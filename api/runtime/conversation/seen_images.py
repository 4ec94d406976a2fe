"""SeenImages: the images of a conversation, from marks in its messages to rows of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....core.errors import InvalidRequest
from ....core.interface.images import PromptImage, image_key
from ...media.reader import ImageReader, ReadImage
from ...media.sources import ImageSource, join_parts, split_marks, template_parts
from ...text.tokenizer import Tokenizer
from .chat_input import ChatInput
from .left_out import tell_left_out

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SeenImages:
    """Images in the order of their marks.

    ``place``: the text that stands for an image in a rendered conversation. ``token_id``: of a row.
    """

    images: Sequence[ReadImage] = ()
    sources: Mapping[str, ImageSource] = field(default_factory=dict)
    place: str = ""
    token_id: int = -1

    def messages(self, messages: Messages, *, in_parts: bool) -> Messages:
        """Messages whose marks are parts, as templates read them; with ``in_parts`` all texts."""
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
        """A rendered conversation with the place of each image become the text of its image.

        Raises `InvalidRequest` where there are more or fewer of them than images.
        """
        if not self.images:
            return text
        pieces = text.split(self.place)
        if len(pieces) != len(self.images) + 1:
            raise InvalidRequest(
                f"the prompt has {self.place} {len(pieces) - 1} times for {len(self.images)} "
                "images: texts may not spell it, and the chat template needs a place for each",
                param="messages",
            )
        written = (image.placeholder.text for image in self.images)
        return "".join([pieces[0], *(a + b for a, b in zip(written, pieces[1:], strict=True))])

    def placed(self, token_ids: Sequence[int], salt: str | None) -> tuple[PromptImage, ...]:
        """The images at their places in a prompt. Raises `InvalidRequest` where they do not fit."""
        if not self.images:
            return ()
        places = [at for at, token_id in enumerate(token_ids) if token_id == self.token_id]
        if len(places) != sum(image.placeholder.num_rows for image in self.images):
            message = (
                "the prompt has another number of image tokens than its images have rows: texts "
                "may not spell them, and each must be one token of this tokenizer"
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


def with_results_seen(chat: ChatInput, reader: ImageReader | None) -> ChatInput:
    """The conversation with a text for each image that cannot be served, but for those of the user.

    An agent goes on with what a tool or a model returned: an error here would come back with each
    request.
    """
    if all(_may_be_served(image, reader) for image in chat.images):
        return chat
    sources = {source.digest: source for source in chat.images}
    messages, images, left = [], [], iter(chat.images)
    for message in chat.messages:
        content = message.get("content")
        if isinstance(content, str):
            parts = [
                each if isinstance(each, str) else next(left)
                for each in split_marks(content, sources)
            ]
            if message.get("role") in ("tool", "assistant"):
                tell_left_out("images in results of tools and in answers")
                parts = [
                    each if isinstance(each, str) or _may_be_served(each, reader) else UNSEEN
                    for each in parts
                ]
                message = {**message, "content": join_parts(parts).text}
            images += [each for each in parts if isinstance(each, ImageSource)]
        messages.append(message)
    return replace(chat, messages=messages, images=images)


def _may_be_served(image: ImageSource, reader: ImageReader | None) -> bool:
    return reader is not None and not image.url.startswith(("http:", "https:"))


async def see(
    chat: ChatInput, reader: ImageReader | None, tokenizer: Tokenizer, *, reason: str = ""
) -> SeenImages:
    """Read the images of a conversation.

    ``reader``: None for a model without images, and then ``reason``, if there is one. Raises
    `InvalidRequest` that names the first image that is not served, and `QueueFull`.
    """
    if not chat.images:
        return NO_IMAGES
    if reader is None:
        raise chat.images[0].refusal(reason or "the model takes no images")
    token_id = reader.token_id
    tokens = reader.tokens(lambda each: tokenizer.decode([each], skip_special_tokens=False))
    if token_id is None or tokens is None:
        raise chat.images[0].refusal("the model's files name no image token")
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
    return SeenImages(images, sources, tokens.place, token_id)


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first, count) of neighbouring places."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return tuple(runs)
