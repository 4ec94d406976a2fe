"""Hostile values in requests with images: refused or served in order, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from fuzz.bodies import places, replaced
from fuzz.conftest import Effort
from fuzz.hostile import VALUES
from fuzz.inprocess import App
from fuzz.test_hostile_values import assert_in_order, assert_nothing_lost
from support.image_folders import data_url, image_part, picture, text_part, write_image_folder

URL = data_url(picture(1))
CHAT = [{"role": "user", "content": [text_part("x"), image_part(picture(1), detail="low")]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}],
            }
        ],
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": URL.partition(",")[2],
                        },
                    },
                    {"type": "text", "text": "x"},
                ],
            }
        ],
        "max_tokens": 2,
    },
    "/tokenize": {"messages": CHAT},
}
URLS = [
    '"data:image/png;base64,"', '"data:;base64,AAAA"', '"data:image/png;base64,////"',
    '"data:image/svg+xml;base64,PHN2Zy8+"', '"file:///etc/passwd"', '"file://../../etc/passwd"',
    '"file:///proc/self/environ"', '"http://169.254.169.254/"', '"javascript:1"', '"data:"',
    '"\\ud800"', '"data:image/png;base64,iVBORw0KGgo="', '"//host/share"',
]  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("seeing")
    write_image_folder(folder, "smolvlm")
    app = App(str(folder), draft="none")
    yield app
    app.close()


@pytest.mark.parametrize("path", BODIES)
def test_a_hostile_value_beside_an_image_harms_nobody(app: App, effort: Effort, path: str) -> None:
    body, rng = BODIES[path], random.Random(f"{effort.seed} {path}")
    expected = app.post(path, body)
    assert expected.status_code == 200, expected.text
    for place in places(body):
        is_url = bool({"url", "data", "image_url"} & set(place[-1:]))
        known = [*URLS, *VALUES] if is_url else VALUES
        for text in [*URLS * is_url, *rng.sample(known, min(effort.examples, len(known)))]:
            response = app.ask("POST", path, replaced(body, place, text))
            assert_in_order(response, f"--fuzz-seed {effort.seed}: {place} = {text[:200]}")
    assert app.post("/tokenize", BODIES["/tokenize"]).status_code == 200
    assert_nothing_lost(app)
