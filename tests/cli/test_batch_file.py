"""The files of ``deepinfer batch``: what is a bad line, what a later run passes over, how a cut line is repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli.batch_file import AnswerFile, LineError, RequestFile, parse_line
from deepinfer.cli.console import UserError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def answer(custom_id: str | None, error: dict[str, Any] | None = None) -> bytes:
    response = None if error else {"status_code": 200, "request_id": "r", "body": {}}
    return json.dumps({"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}).encode() + b"\n"


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"\xff\xfe{}", "invalid_utf8", "UTF-8"),
        (b"{not json", "invalid_json", "not JSON"),
        (b"[" * 100_000, "invalid_json", "JSON"),
        (b'{"custom_id": "a", "n": NaN}', "invalid_json", "NaN"),
        (b"[1]", "invalid_line", "JSON object"),
        (json.dumps({**GOOD, "custom_id": 3}).encode(), "invalid_line", "custom_id"),
        (json.dumps({**GOOD, "custom_id": ""}).encode(), "invalid_line", "custom_id"),
        (json.dumps({**GOOD, "method": "GET"}).encode(), "invalid_line", "POST"),
        (json.dumps({**GOOD, "url": "/v1/embeddings"}).encode(), "invalid_url", "/v1/chat/completions"),
        (json.dumps({**GOOD, "body": "x"}).encode(), "invalid_line", "body"),
    ],
)
def test_a_bad_line_names_its_mistake(raw: bytes, code: str, says: str) -> None:
    with pytest.raises(LineError, match=says) as caught:
        parse_line(7, raw)
    assert caught.value.code == code


def test_a_good_line_is_read() -> None:
    line = parse_line(3, json.dumps(GOOD).encode())
    assert (line.number, line.custom_id, line.url, line.body) == (3, "a", "/v1/completions", {"prompt": "x"})


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}')
    source = RequestFile(str(path))
    assert source.count() == 2
    assert list(source.lines()) == [(1, b'{"a": 1}\n'), (4, b'{"b": 2}')]
    source.close()


def test_answers_are_found_by_id_and_refused_lines_by_number(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    refused = answer("dup", {"code": "duplicate_custom_id", "message": "m", "line": 4})
    failed = answer("again", {"code": "engine_error", "message": "m"})
    path.write_bytes(answer("a") + refused + failed)
    with AnswerFile(str(path)) as target:
        assert target.done.custom_ids == {"a"}
        assert target.done.error_lines == {4}
        target.append({"id": "batch_req_2", "custom_id": "b", "response": None, "error": None})
    assert path.read_bytes().startswith(answer("a") + refused + failed)
    assert json.loads(path.read_bytes().splitlines()[-1])["custom_id"] == "b"


@pytest.mark.parametrize("cut", range(1, len(answer("b"))))
def test_a_line_cut_anywhere_is_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    whole = answer("b")
    path.write_bytes(answer("a") + whole[:cut])
    with AnswerFile(str(path)) as target:
        complete = cut == len(whole) - 1  # only the line break is missing
        assert target.done.custom_ids == ({"a", "b"} if complete else {"a"})
    assert path.read_bytes() == answer("a") + (whole if complete else b"")


def test_a_first_line_cut_short_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a")[:40])
    with AnswerFile(str(path)) as target:
        assert target.done.custom_ids == set()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", answer("a") + b'{"x": 1}\n', b'{"id": "order-1"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="name another output file"):
        AnswerFile(str(path))
    assert path.read_bytes() == content


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(str(path)), pytest.raises(UserError, match="another run"):
        AnswerFile(str(path))


def test_an_id_that_utf8_cannot_hold_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    odd = json.loads('"\\ud800"')
    with AnswerFile(str(path)) as target:
        target.append({"id": "batch_req_1", "custom_id": odd, "response": {}, "error": None})
    with AnswerFile(str(path)) as target:
        assert target.done.custom_ids == {odd}


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero"])
def test_an_output_that_cannot_be_read_back_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="no regular file"):
        AnswerFile(path)
