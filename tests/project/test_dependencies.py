"""What the package imports is declared: nothing comes along with something else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DISTRIBUTIONS = {  # of a module whose name is another
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
}
OPTIONAL = {  # where an extra is needed, and imported for it alone
    "triton": "cuda",
    "opentelemetry": "otel",
    "matplotlib": "bench",
}


def declared(requirements: list[str]) -> set[str]:
    """Names of distributions, in lower case."""
    return {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in requirements}


def imported(package: str) -> set[str]:
    """Modules of others that the files of a package import, wherever they do."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"foretoken"}


@pytest.mark.parametrize("package", ["radix_cache", "core", "draft", "api"])
def test_every_import_is_declared(package: str) -> None:
    names = declared(PROJECT["dependencies"])
    extras = {name: declared(each) for name, each in PROJECT["optional-dependencies"].items()}
    for module in sorted(imported(package)):
        if module in OPTIONAL:
            assert any(each.startswith(module) for each in extras[OPTIONAL[module]]), module
        else:
            assert DISTRIBUTIONS.get(module, module).lower() in names, module


def test_uvicorn_is_pinned_to_the_minor_whose_private_class_is_extended() -> None:
    import uvicorn

    [requirement] = [each for each in PROJECT["dependencies"] if each.startswith("uvicorn")]
    minor = int(uvicorn.__version__.split(".")[1])
    assert requirement == f"uvicorn>=0.{minor},<0.{minor + 1}"


def test_nothing_is_declared_that_is_not_imported() -> None:
    used = set().union(*(imported(each) for each in ("radix_cache", "core", "draft", "api")))
    names = {DISTRIBUTIONS.get(module, module).lower() for module in used}
    # uvloop is imported by name; jinja2's loop controls come with it
    assert declared(PROJECT["dependencies"]) - names <= {"uvloop"}
