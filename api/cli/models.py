"""``foretoken list``, ``show``, ``models``, ``pull`` and ``rm``: models on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...core.config import format_size
from ...core.errors import InvalidRequest
from .config import Chosen, Given
from .flags import Parser

KINDS = (Chosen,)


def add_flags(parser: Parser) -> None:
    """Add the model argument of ``foretoken pull`` and ``rm``."""
    parser.add_argument("model", metavar="MODEL", help="hub id: OWNER/NAME or OWNER/NAME@REVISION")


def add_show_flags(parser: Parser) -> None:
    """Add the model argument of ``foretoken show``."""
    parser.add_argument("model", metavar="MODEL", help="model, as for `foretoken serve`")


def add_models_flags(parser: Parser) -> None:
    """Add the arguments of ``foretoken models``."""
    parser.add_argument(
        "action", nargs="?", choices=("check",), help="check: describe MODEL, like `foretoken show`"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model, as for `foretoken serve`")


def pull(parsed: argparse.Namespace) -> int:
    """Download a model and print its folder."""
    from ..build import hub

    name = _hub_name(parsed)
    path = hub.download(name)
    print(path)
    return 0


def list_all(_parsed: argparse.Namespace) -> int:
    """Print the models on this machine and the kinds of models that can be served."""
    from ..build import hub
    from ..build.model_files import other_models, ready_models

    print(*ready_models(), sep="\n")
    for each in hub.cached_models():
        refs = ", ".join((each.commit[: hub.SHORT], *each.refs))
        print(f"{each.name:48} {format_size(each.num_bytes):>10}  {refs}")
    print(f"\n{other_models()}")
    return 0


def models(parsed: argparse.Namespace) -> int:
    """Run ``list`` or ``show`` under their former names."""
    now = "list" if parsed.action is None else "show MODEL"
    print(f"`foretoken models` is now `foretoken {now}`", file=sys.stderr)
    if parsed.action is None:
        return list_all(parsed)
    if parsed.model is None:
        parsed.parser.error("models check needs MODEL: a folder, a GGUF file or a name")
    return _check(parsed.model)


def remove(parsed: argparse.Namespace) -> int:
    """Delete a model from the cache: the named revision, or all of them."""
    from ..build import hub

    name = _hub_name(parsed)
    print(f"{name}: {format_size(hub.remove(name))} freed")
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print the files and requirements of a model, without downloading it.

    Returns 2 if it cannot be served.
    """
    from ..build import hub
    from ..build.model_files import find_model

    model = _name(parsed)
    if hub.is_hub_id(model) and not Path(model).exists():
        codes = []
        for each in hub.find_cached(model):
            refs = f" ({', '.join(each.refs)})" if each.refs else ""
            print(f"model     {each.name}\nrevision  {each.commit}{refs}\nfolder    {each.path}")
            print(f"files     {each.num_files}, {format_size(each.num_bytes)}")
            codes.append(_check(str(each.path)))
        return min(codes)
    print(f"folder    {find_model(model).path}")
    return _check(model)


def _check(model: str) -> int:
    """Print the requirements and sampling defaults of a model. Return 2 if it cannot be served."""
    from ...core.config import EngineConfig
    from ..build.model_files import check_model, find_model
    from ..build.sampling_defaults import described, sampling_defaults

    code = check_model(model)
    if code == 0:
        print(f"sampling  {described(sampling_defaults(find_model(model), EngineConfig()))}")
    return code


def _name(parsed: argparse.Namespace) -> str:
    """Return the model's name with its revision.

    Raises `InvalidRequest` if a revision is given for a model that is not from the hub.
    """
    from ..build import hub

    given = Given(parsed, KINDS)
    given.warn_of_unknown_variables()
    chosen = given.make(Chosen)
    if chosen.offline:
        hub.go_offline()
    return hub.at_revision(parsed.model, chosen.revision) or ""


def _hub_name(parsed: argparse.Namespace) -> str:
    """Return the hub model with its revision. Raises `InvalidRequest` for other models."""
    from ..build import hub

    name = _name(parsed)
    if not hub.is_hub_id(name):
        raise InvalidRequest(f"{name} is not a hub id of the form OWNER/NAME", param="model")
    return name
