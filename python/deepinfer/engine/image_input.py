"""Images of a prompt: read from what a user has, placed among its token ids, cut with it.

Owns: the forms an image may have, limits, placeholders and spans. Never touches: sizes and values that a model wants (its
`ImageProcessor`), tensors. All that can be wrong with an image is an `ImageError` of its request.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.engine.config import EngineConfig
from deepinfer.errors import HandoverError, ImageError
from deepinfer.models.base import Model, ModelOptions
from deepinfer.models.images import ImageInput, ImageProcessor, ImageSpan, Pixels, VisionModel

_NEEDS_PILLOW = "image {place} needs Pillow to be read, which is not installed; install it with: pip install 'deepinfer[images]'"
_FORMS = "a PIL image, a uint8 array [height, width, 3], the bytes of an image file or its path"

_FILES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Kinds of files that are read. Pillow knows many more, some of which start other programs (EPS) or are seldom looked after."""


@dataclass(frozen=True)
class ImageRules:
    """What images a request may bring.

    Args:
        processor: the model's.
        most: images of one prompt.
        most_pixels: width times height of one image as it comes.
    """

    processor: ImageProcessor
    most: int
    most_pixels: int


def image_rules(config: EngineConfig, processor: ImageProcessor | None) -> ImageRules | None:
    """What an engine's settings allow of its model; ``None`` if that takes no images."""
    return None if processor is None else ImageRules(processor, config.max_images_per_prompt, config.max_image_pixels)


def image_processor(model: Model) -> ImageProcessor | None:
    """How the model wants its images; ``None`` if it takes none."""
    return model.image_processor if isinstance(model, VisionModel) else None


def prepare_images(images: Any, rules: ImageRules | None) -> list[ImageInput]:
    """Reads and prepares the images of one prompt.

    Raises:
        ImageError: the model takes none, there are too many, or one of them cannot be used; the message says which.
    """
    if not isinstance(images, Sequence) or isinstance(images, str | bytes | bytearray | memoryview):
        raise ImageError(f"'images' must be a list, got {type(images).__name__}; an image is {_FORMS}")
    if not images:
        return []
    if rules is None:
        raise ImageError("this model takes no images; leave 'images' out")
    check_count(len(images), rules)
    return [rules.processor.prepare(_read(source, place, rules.most_pixels)) for place, source in enumerate(images)]


def check_count(count: int, rules: ImageRules) -> None:
    """Raises ImageError for more images than a prompt may have."""
    if count > rules.most:
        raise ImageError(f"the prompt has {count} images, max_images_per_prompt is {rules.most}; give fewer or raise it")


def file_bytes(rules: ImageRules) -> int:
    """Most bytes of an image file that come in a message: what its pixels take uncompressed with transparency, and a head."""
    return 4 * rules.most_pixels + (1 << 16)


def _read(source: Any, place: int, most: int) -> Pixels:
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise ImageError(
                f"image {place} is an array {list(source.shape)} of {source.dtype}; give uint8 [height, width, 3] with at least one pixel"
            )
        _check_size(place, source.shape[1], source.shape[0], most)
        return source
    pillow = sys.modules.get("PIL.Image")  # whoever has such an image has imported it
    if pillow is not None and isinstance(source, pillow.Image):
        return _decode(source, place, most)
    if isinstance(source, str) and "://" in source:
        raise ImageError(f"image {place} is an address, and nothing is fetched from a network; give {_FORMS}")
    if not isinstance(source, str | os.PathLike | bytes | bytearray | memoryview):
        raise ImageError(f"image {place} is of type {type(source).__name__}; give {_FORMS}")
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImageError(_NEEDS_PILLOW.format(place=place)) from None
    try:
        with Image.open(Path(source) if isinstance(source, str | os.PathLike) else io.BytesIO(source), formats=_FILES) as opened:
            return _decode(opened, place, most)
    except ImageError:
        raise
    except UnidentifiedImageError:  # its message has an address in memory
        raise ImageError(f"image {place} cannot be read: it is no {', '.join(_FILES[:-1])} or {_FILES[-1]} file; give {_FORMS}") from None
    except Exception as e:  # decoders of many formats raise what they like
        raise _unreadable(place, e) from None


def _decode(image: Any, place: int, most: int) -> Pixels:
    width, height = image.size  # known before anything is decoded
    _check_size(place, width, height, most)
    try:
        return np.asarray(image.convert("RGB"))
    except Exception as e:
        raise _unreadable(place, e) from None


def _unreadable(place: int, error: Exception) -> ImageError:
    said = " ".join(str(error).split())
    return ImageError(f"image {place} cannot be read ({type(error).__name__}: {said}); give {_FORMS}")


def _check_size(place: int, width: int, height: int, most: int) -> None:
    if width * height > most:
        raise ImageError(
            f"image {place} has {width} x {height} = {width * height} pixels, max_image_pixels is {most}; scale it down or raise it"
        )
    if width < 1 or height < 1:
        raise ImageError(f"image {place} is {width} x {height} pixels; give at least one")


def place_images(ids: list[int], images: Sequence[ImageInput], token: int) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Ids in which every image has as many placeholders ``token`` as it takes tokens, and where they stand.

    The prompt has one placeholder for each image, or all of them.

    Raises:
        ImageError: neither; the message gives the numbers.
    """
    holders = [place for place, i in enumerate(ids) if i == token]
    sizes = [image.tokens for image in images]
    if len(holders) == len(images):
        expanded: list[int] = []
        spans = []
        before = 0
        for place, image in zip(holders, images, strict=True):
            expanded += ids[before:place]
            spans.append(ImageSpan(len(expanded), image))
            expanded += [token] * image.tokens
            before = place + 1
        return expanded + ids[before:], tuple(spans)
    if len(holders) != sum(sizes):
        raise ImageError(
            f"the prompt has {len(holders)} placeholders (token {token}) for {len(images)} images of {_shown(sizes)} tokens: "
            f"give one for each image, or all {sum(sizes)}"
        )
    spans = []
    at = 0
    for number, image in enumerate(images):
        run = holders[at : at + image.tokens]
        if run[-1] - run[0] + 1 != image.tokens:
            row = next(n for n, (place, first) in enumerate(zip(run, range(run[0], run[-1] + 1), strict=False)) if place != first)
            raise ImageError(f"image {number} takes {image.tokens} tokens in a row, and the prompt has {row} placeholders at {run[0]}")
        spans.append(ImageSpan(run[0], image))
        at += image.tokens
    return ids, tuple(spans)


def _shown(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")


def cut_spans(spans: Sequence[ImageSpan], cut: int) -> tuple[ImageSpan, ...]:
    """Spans of a prompt that lost its first ``cut`` tokens; images before it are gone with them.

    Raises:
        ImageError: it cuts an image.
    """
    for number, span in enumerate(spans):
        if span.start < cut < span.end:
            raise ImageError(
                f"truncate_prompt_tokens cuts image {number}, tokens {span.start} to {span.end - 1}, at {cut}; "
                "keep all of it or none, or shorten the text"
            )
    return tuple(ImageSpan(span.start - cut, span.image) for span in spans if span.start >= cut)


def check_handed_images(spans: Sequence[ImageSpan], prompt: Sequence[int], processor: ImageProcessor | None) -> None:
    """Whether images that came with a hand-over are such as a model prepares, and stand where its prompt shows images.

    Raises:
        HandoverError: they do not; the message says which.
    """
    if spans and processor is None:
        raise HandoverError("the hand-over record has images, and the model here takes none; run one model on both sides")
    for number, span in enumerate(spans):
        assert processor is not None
        height, width = span.image.pixels.shape[:2]
        if processor.final_tokens(height, width) != span.image.tokens:
            raise HandoverError(
                f"the hand-over record says that image {number} of {width} x {height} pixels takes {span.image.tokens} tokens, "
                "which is no size that the model here takes"
            )
        if any(token != processor.token for token in prompt[span.start : span.end]):
            raise HandoverError(f"the hand-over record has image {number} at token {span.start}, where the prompt shows none")


def check_images(spans: Sequence[ImageSpan], prompt: int, model: Model, options: ModelOptions) -> None:
    """Whether an engine can run a request of ``prompt`` tokens with these images.

    Raises:
        ImageError: its model takes none, or a truncated prefill would cut one.
    """
    if not spans:
        return
    if image_processor(model) is None:
        raise ImageError("this model takes no images; leave 'images' out")
    if options.truncation == "off" or options.keep_tokens is None:
        return
    first = prompt - options.keep_tokens
    for number, span in enumerate(spans):
        if span.start < first < span.end:
            raise ImageError(
                f"yoco_prefill_keep_tokens={options.keep_tokens} leaves the prompt whole from token {first} on, within image {number} "
                f"(tokens {span.start} to {span.end - 1}): put {span.end - first} more tokens of text behind it or {first - span.start} "
                "fewer, or start the engine with another number"
            )
