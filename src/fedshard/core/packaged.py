"""Files that come with fedshard: beside the source in a checkout, inside the package in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # …/fedshard
CHECKOUT = PACKAGE.parents[1]  # above src/, where the package has not been installed as a wheel


def packaged_folder(name: str) -> Path:
    """The folder `name` (`clusters`, …) of the files that come with fedshard.

    A wheel carries it as `fedshard/NAME`; in a checkout it stands at the root of the repository.

    >>> (packaged_folder("clusters") / "workstation-8.toml").is_file()
    True
    """
    inside = PACKAGE / name
    return inside if inside.is_dir() else CHECKOUT / name
