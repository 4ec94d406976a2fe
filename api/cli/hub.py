"""``foretoken pull``, ``list``, ``rm`` and ``show``: models of the hub and of its cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.config import format_size
from ...core.errors import InvalidRequest
from .config import Chosen, Given
from .flags import Parser

KINDS = (Chosen,)


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the four commands."""
    for name, run, help in (
        ("pull", pull, "download a model of the hub into the cache"),
        ("show", show, "describe a model of this machine: files, type, memory"),
        ("rm", remove, "delete a model of the hub from the cache"),
    ):
        command = commands.add_parser(name, help=help, usage="%(prog)s MODEL [flags]")
        command.set_defaults(run=run, parser=command)
        command.add_argument(
            "model", metavar="MODEL", help="id of the hub, OWNER/NAME or OWNER/NAME@REVISION"
        )
        command.add_settings(*KINDS)
    listing = commands.add_parser("list", help="list the models of this machine")
    listing.set_defaults(run=list_all, parser=listing)


def pull(parsed: argparse.Namespace) -> int:
    """Download and print where it is."""
    from ..build import hub

    name = _hub_name(parsed)
    path = hub.download(name)
    print(path)
    return 0


def list_all(_parsed: argparse.Namespace) -> int:
    """Print the models that need no download, those of the cache with revision and size."""
    from ..build import hub
    from ..build.model_files import SMOLLM2, smollm2_file

    if smollm2_file() is not None:
        print(SMOLLM2)
    print("builtin")
    for each in hub.cached_models():
        refs = ", ".join((each.commit[: hub.SHORT], *each.refs))
        print(f"{each.name:48} {format_size(each.num_bytes):>10}  {refs}")
    return 0


def remove(parsed: argparse.Namespace) -> int:
    """Delete all revisions in the cache, or the one that is named."""
    from ..build import hub

    name = _hub_name(parsed)
    print(f"{name}: {format_size(hub.remove(name))} freed")
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print the files of a model and what `foretoken models check` says; downloads nothing."""
    from ..build import hub
    from ..build.model_files import check_model, find_model

    model = _name(parsed)
    if hub.is_hub_id(model) and not Path(model).exists():
        for each in hub.find_cached(model):
            refs = f" ({', '.join(each.refs)})" if each.refs else ""
            print(f"model     {each.name}\nrevision  {each.commit}{refs}\nfolder    {each.path}")
            print(f"files     {each.num_files}, {format_size(each.num_bytes)}")
            check_model(str(each.path))
        return 0
    print(f"folder    {find_model(model).path}")
    return check_model(model)


def _name(parsed: argparse.Namespace) -> str:
    """The model with its revision. Raises `InvalidRequest` for a revision of another model."""
    from ..build import hub

    given = Given(parsed, KINDS)
    given.warn_of_unknown_variables()
    chosen = given.make(Chosen)
    if chosen.offline:
        hub.go_offline()
    return hub.at_revision(parsed.model, chosen.revision) or ""


def _hub_name(parsed: argparse.Namespace) -> str:
    """The same for a model of the hub. Raises `InvalidRequest` for another."""
    from ..build import hub

    name = _name(parsed)
    if not hub.is_hub_id(name):
        raise InvalidRequest(f"{name} is no model of the hub, OWNER/NAME", param="model")
    return name
