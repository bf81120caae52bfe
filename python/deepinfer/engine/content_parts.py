"""The content of chat messages where it is a list of parts: what a template is shown, and the images among them.

Owns: the forms a part may have, and data URLs. Never touches: pixels (see `image_input`), templates, anything a URL points to.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import ImageError, InvalidRequestError

_TEXT = ("text", "input_text", "output_text")
_IMAGE = ("image", "image_url")
_FORMS = (
    "{'type': 'text', 'text': ...}, {'type': 'image', 'image': <PIL image, uint8 array, bytes or path>} and "
    "{'type': 'image_url', 'image_url': {'url': 'data:image/...;base64,...'}}"
)


@dataclass(frozen=True)
class DataUrl:
    """An image within a message, as it came."""

    where: str
    url: str = field(repr=False)

    def decoded(self, most: int) -> bytes:
        """The image file's bytes, ``most`` of them at most.

        Raises:
            ImageError: too long, or no image in base64.
        """
        head, comma, body = self.url.partition(",")
        if not comma or not head[5:].lower().startswith("image/") or not head.lower().endswith(";base64"):
            raise ImageError(f"{self.where} has a data URL that does not begin with 'data:image/...;base64,'")
        if len(body) // 4 * 3 > most:
            raise ImageError(f"{self.where} has an image of over {most} bytes, more than max_image_pixels leaves room for; scale it down")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as e:
            raise ImageError(f"{self.where} has a data URL that is no base64 ({e})") from None


def has_images(messages: Any) -> bool:
    """Whether any message has an image part; of what is no list of messages, no."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return False
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [p for c in contents if isinstance(c, Sequence) and not isinstance(c, str | bytes) for p in c]
    return any(isinstance(p, Mapping) and p.get("type") in _IMAGE for p in parts)


def read_parts(parts: Sequence[Any], where: str) -> tuple[str | list[dict[str, str]], list[Any]]:
    """What a template is shown of a message's parts, and its images: text alone is joined by newlines, with images the parts stay
    apart, each image as ``{"type": "image"}``.

    Raises:
        InvalidRequestError: a part has none of the known forms.
        ImageError: an image part has no image, or an address.
    """
    shown: list[dict[str, str]] = []
    images: list[Any] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, str):
            shown.append({"type": "text", "text": part})
        elif kind in _TEXT and isinstance(part.get("text"), str):
            shown.append({"type": "text", "text": str(part["text"])})
        elif kind in _IMAGE:
            images.append(_image(part, where))
            shown.append({"type": "image"})
        else:
            raise InvalidRequestError(f"{where} has a part of type {kind!r} that cannot be read; parts are {_FORMS}")
    if images:
        return shown, images
    return "\n".join(part["text"] for part in shown), images


def _image(part: Mapping[str, Any], where: str) -> Any:
    if part["type"] == "image":
        if part.get("image") is None:
            raise ImageError(f"{where} has an image part without 'image'; parts are {_FORMS}")
        return part["image"]
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise ImageError(f"{where} has an image_url part without 'url'; parts are {_FORMS}")
    if not url[:5].lower() == "data:":
        raise ImageError(f"{where} has an image at {url[:80]!r}, and nothing is fetched; give a data URL, or the image itself: {_FORMS}")
    return DataUrl(where, url)
