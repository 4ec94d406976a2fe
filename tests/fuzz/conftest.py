"""``pytest tests/fuzz --fuzz-examples N --fuzz-seed S``: how long, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from foretoken.api.serving.settings import Settings
from fuzz.inprocess import App

EXAMPLES, SEED = 8, 1


@dataclass(frozen=True)
class Effort:
    """The number of inputs that each generator makes, and the seed that they follow from."""

    examples: int
    seed: int


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-examples", type=int, default=EXAMPLES, help="inputs per generator")
    group.addoption("--fuzz-seed", type=int, default=SEED, help="the same seed, the same inputs")


@pytest.fixture(scope="session")
def effort(request: pytest.FixtureRequest) -> Effort:
    """Effort that the command line sets; its defaults where tests/fuzz is not on it."""
    option = request.config.getoption
    return Effort(option("--fuzz-examples", EXAMPLES), option("--fuzz-seed", SEED))


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The built-in model; its answers have receipts."""
    app = App(settings=Settings(receipts=str(tmp_path_factory.mktemp("keys") / "keys.pem")))
    yield app
    app.close()
