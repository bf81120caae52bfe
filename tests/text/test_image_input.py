"""Images of a prompt: what they may be, where they stand, what is refused and in which words."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.image_input import ImageRules, cut_spans, place_images, prepare_images
from deepinfer.engine.input_processor import InputProcessor, ModelLimits
from deepinfer.errors import ImageError
from deepinfer.models.deepseek_v41.image_input import ImageSizes
from deepinfer.models.images import ImageInput, ImageSpan
from deepinfer.sampling import SamplingParams

TOKEN = 9
SIZES = ImageSizes(TOKEN, max_tokens=64, patch=14, merge=3, min_pixels=1764)
FULL = ImageSizes(129264, max_tokens=1024, patch=14, merge=3, min_pixels=295936)
RULES = ImageRules(SIZES, most=3, most_pixels=100_000)
PARAMS = SamplingParams(max_tokens=4, detokenize=False)


def pixels(height: int = 42, width: int = 42, seed: int = 0) -> Any:
    return np.random.RandomState([seed, height, width]).randint(0, 256, (height, width, 3)).astype(np.uint8)


def inputs(rules: ImageRules | None = RULES, longest: int = 40) -> InputProcessor:
    return InputProcessor(None, None, limits=ModelLimits(longest, 20, rules))


def prepared(ids: list[int], *images: Any, rules: ImageRules | None = RULES, **values: Any) -> tuple[list[int], list[tuple[int, int]]]:
    params = SamplingParams(max_tokens=4, detokenize=False, **values)
    prompt: Any = {"prompt_token_ids": ids, "images": list(images)}
    request, _ = inputs(rules).prepare(prompt, params, "r", stream=False)
    return request.prompt_ids, [(span.start, span.end) for span in request.images]


def refused(ids: list[int], *images: Any, rules: ImageRules | None = RULES, **values: Any) -> str:
    with pytest.raises(ImageError) as caught:
        prepared(ids, *images, rules=rules, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "given", "target", "tokens"),
    [
        (FULL, (544, 544), (546, 546), 184),  # the least number of pixels, whole patches
        (FULL, (100, 100), (546, 546), 184),  # scaled up: sqrt(295936 / 10000) * 100 = 544
        (FULL, (300, 100), (952, 322), 209),  # 942 and 314 behind the scaling
        (FULL, (1000, 1500), (1008, 1512), 890),
        (FULL, (4000, 4000), (1302, 1302), 994),  # 31 cells a side: 31 * 32 + 2
        (FULL, (2000, 3000), (1050, 1568), 977),  # 25.8 cells down, 38.7 across: by 25 * 42 / 2000
        (FULL, (20000, 100), (8400, 42), 402),
        (FULL, (100, 20000), (84, 16800), 804),
        (SIZES, (1, 100_000), (42, 2562), 64),
        (SIZES, (1, 1), (42, 42), 4),
    ],
)
def test_sizes_are_those_of_the_release(sizes: ImageSizes, given: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
    assert sizes.target(*given) == target
    assert sizes.tokens(*target) == tokens <= sizes.max_tokens


def test_every_size_fits() -> None:
    draw = np.random.RandomState(0)
    for sizes in (SIZES, FULL):
        for height, width in np.exp(draw.uniform(0, 12, (2000, 2))).astype(int).tolist():
            high, wide = sizes.target(height, width)
            assert high % 14 == wide % 14 == 0 and min(high, wide) >= 14 and sizes.tokens(high, wide) <= sizes.max_tokens, (height, width)


def test_placeholders_are_one_an_image_or_all() -> None:
    one, two = pixels(), pixels(42, 84)
    expected = ([1, *[TOKEN] * 4, *[TOKEN] * 5, 2], [(1, 5), (5, 10)])
    assert prepared([1, TOKEN, TOKEN, 2], one, two) == expected
    assert prepared(expected[0], one, two) == expected
    assert prepared([TOKEN], one) == ([TOKEN] * 4, [(0, 4)])
    assert prepared([1, 2]) == ([1, 2], [])
    assert prepared([1, TOKEN], rules=None) == ([1, TOKEN], []), "a model without images has no such token"


def test_placeholders_and_images_that_do_not_fit() -> None:
    one, two = pixels(), pixels(42, 84)
    assert "0 placeholders (token 9) for 1 images of 4 tokens" in refused([1, 2], one)
    assert "3 placeholders (token 9) for 1 images of 4 tokens: give one for each image, or all 4" in refused([TOKEN] * 3, one)
    assert "1 placeholders (token 9) for 2 images of 4, 5 tokens" in refused([TOKEN], one, two)
    assert "image 1 takes 5 tokens in a row, and the prompt has 4 placeholders at 5" in refused(
        [TOKEN] * 4 + [1] + [TOKEN] * 4 + [1, TOKEN], one, two
    )
    assert "2 placeholders (token 9) and no images" in refused([TOKEN, 1, TOKEN])
    assert "takes no images" in refused([1], one, rules=None)
    assert "4 images, max_images_per_prompt is 3" in refused([TOKEN] * 4, *[one] * 4)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((42, 42)), "array [42, 42] of float64; give uint8"),
        (np.zeros((42, 42, 3), np.float32), "of float32"),
        (np.zeros((42, 42, 4), np.uint8), "[42, 42, 4] of uint8"),
        (np.zeros((0, 42, 3), np.uint8), "at least one pixel"),
        (np.zeros((1, 100_001, 3), np.uint8), "100001 x 1 = 100001 pixels, max_image_pixels is 100000"),
        (7, "image 0 is of type int"),
        (None, "image 0 is of type NoneType"),
        ("https://example.org/a.png", "nothing is fetched"),
    ],
)
def test_what_is_no_image(image: Any, said: str) -> None:
    assert said in refused([TOKEN], image)


def test_images_come_in_a_list() -> None:
    for wrong in (b"abc", "a.png", pixels(), 3):
        with pytest.raises(ImageError, match="must be a list"):
            prepare_images(wrong, RULES)


def test_truncation_keeps_whole_images_only() -> None:
    ids, one, two = [1, TOKEN, 2, TOKEN, 3], pixels(), pixels(42, 84)  # 1 | 4 | 2 | 5 | 3
    assert prepared(ids, one, two, truncate_prompt_tokens=12) == prepared(ids, one, two)
    assert prepared(ids, one, two, truncate_prompt_tokens=11)[1] == [(0, 4), (5, 10)]
    assert prepared(ids, one, two, truncate_prompt_tokens=7)[1] == [(1, 6)]
    assert prepared(ids, one, two, truncate_prompt_tokens=1) == ([3], [])
    assert "cuts image 0, tokens 1 to 4, at 2" in refused(ids, one, two, truncate_prompt_tokens=10)
    assert "cuts image 1, tokens 6 to 10, at 10" in refused(ids, one, two, truncate_prompt_tokens=2)


def test_spans_move_with_their_ids() -> None:
    image = ImageInput.of(pixels(), 4)
    ids, spans = place_images([5, TOKEN, 6], [image], TOKEN)
    assert (ids, spans[0].start, spans[0].end) == ([5, TOKEN, TOKEN, TOKEN, TOKEN, 6], 1, 5)
    assert [span.start for span in cut_spans([ImageSpan(1, image), ImageSpan(5, image)], 5)] == [0]


def test_without_pillow_only_whole_sizes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    assert prepared([TOKEN], pixels())[1] == [(0, 4)]
    for image in (pixels(40, 42), b"png", "a.png"):
        assert "deepinfer[images]" in refused([TOKEN], image)


class TestWithPillow:
    @pytest.fixture(autouse=True)
    def pillow(self) -> Any:
        return pytest.importorskip("PIL.Image")

    def test_every_form_is_the_same_image(self, pillow: Any, tmp_path: Path) -> None:
        array = pixels(60, 90)
        file = io.BytesIO()
        pillow.fromarray(array).save(file, "png")
        (tmp_path / "a.png").write_bytes(file.getvalue())
        forms = [array, pillow.fromarray(array), pillow.open(file), file.getvalue(), bytearray(file.getvalue())]
        forms += [tmp_path / "a.png", str(tmp_path / "a.png")]
        made = [prepare_images([form], RULES)[0] for form in forms]
        assert len({image.digest for image in made}) == 1 and made[0].pixels.shape == (70, 98, 3)
        assert prepare_images([pixels(60, 90, 1)], RULES)[0].digest != made[0].digest

    def test_a_picture_is_fitted_into_grey(self) -> None:
        (image,) = prepare_images([np.zeros((30, 90, 3), np.uint8)], RULES)  # 42 x 98 has other proportions
        assert image.pixels.shape == (42, 98, 3) and image.tokens == 6
        assert set(np.unique(image.pixels)) == {0, 127}
        rows = (image.pixels == 0).all((1, 2))
        assert rows.sum() == 33 and rows[4:37].all(), "in the middle"
        clear = np.full((42, 42, 4), 0, np.uint8)
        clear[..., 0] = 200
        from PIL import Image

        assert (prepare_images([Image.fromarray(clear)], RULES)[0].pixels == [200, 0, 0]).all(), "without its transparency"

    def test_files_that_are_none(self, pillow: Any, tmp_path: Path) -> None:
        file = io.BytesIO()
        pillow.fromarray(pixels(60, 90)).save(file, "png")
        for broken in (b"", b"no image", file.getvalue()[:-200], tmp_path / "missing.png", str(tmp_path)):
            assert "image 0 cannot be read" in refused([TOKEN], broken)

    def test_no_file_is_read_that_needs_another_program(self, pillow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*_: Any, **__: Any) -> None:
            raise AssertionError("a program was started for an image")

        monkeypatch.setattr("subprocess.Popen", run)
        monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
        for file in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", b"<svg/>", b"%PDF-1.4\n", b""):
            said = refused([TOKEN], file)
            assert "it is no PNG, JPEG, WEBP, GIF, BMP or TIFF file" in said and "0x" not in said
        large = io.BytesIO()
        pillow.new("1", (1000, 101)).save(large, "png")
        assert "1000 x 101 = 101000 pixels" in refused([TOKEN], large.getvalue())
