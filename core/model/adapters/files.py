"""File names of an adapter, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def leads_over_link(folder: Path, below: Path) -> bool:
    """Whether the path from the folder ``below`` to an adapter's files contains a symbolic link.

    The call reads the file system. Raises OSError or ValueError for an invalid path, and ValueError
    for a path outside ``below``.
    """
    steps = folder.relative_to(below).parts
    folders = [below.joinpath(*steps[: count + 1]) for count in range(len(steps))]
    return any(
        each.is_symlink() for each in (*folders, folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    )
