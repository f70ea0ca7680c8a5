"""Reading cluster files: those that come with fedshard by name, others by path, and every fault at once."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedshard.core.errors import Fault, InputError
from fedshard.core.packaged import packaged_folder
from fedshard.core.topology import Cluster, Constant, Device, Efficiency, Jitter, Placement, Tier

PARTS: tuple[type[BaseModel], ...] = (Cluster, Device, Tier, Constant, Efficiency, Jitter, Placement)


def cluster_names() -> list[str]:
    """The names of the clusters that come with fedshard, sorted."""
    return sorted(path.stem for path in packaged_folder("clusters").glob("*.toml"))


def read_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of this name, or of the file at this path.

    Raises InputError where there is none, or with everything that is wrong with its file.

    >>> read_cluster("leonardo-nominal").ranks_per_node
    4
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = _packaged(str(name_or_path))
    return make_cluster(_read(path), str(path))


def make_cluster(raw: dict[str, Any], file: str = "cluster") -> Cluster:
    """A cluster from a raw tree; `file` is what its faults are named after. Raises InputError with all of them."""
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise InputError([_fault(each, file) for each in error.errors(include_url=False)]) from None


def _packaged(name: str) -> Path:
    names = cluster_names()
    if name in names:
        return packaged_folder("clusters") / f"{name}.toml"
    nearest = difflib.get_close_matches(name, names, 1)
    mend = f"Did you mean {nearest[0]}? " if nearest else ""
    mend += f"There are {', '.join(names)}; or give the path of a .toml file."
    raise InputError([Fault("cluster", f"no cluster {name!r} comes with fedshard", mend)])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        mend = f"Give a cluster's file, or one of {', '.join(cluster_names())}."
        raise InputError([Fault(str(path), "no such file", mend)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([Fault(str(path), f"cannot be read ({error})", "Give a readable TOML file.")]) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError([Fault(str(path), f"is not TOML ({error})", "Mend the line it names.")]) from None


def _fault(error: Any, file: str) -> Fault:
    """One of pydantic's errors in our words. `[key]` marks a faulty key of a mapping, which is no key of the file."""
    path = [str(part) for part in error["loc"] if part != "[key]"]
    key = f"{file}: {'.'.join(path)}" if path else file
    if error["type"] == "extra_forbidden":
        known = sorted({name for part in PARTS for name in part.model_fields})
        nearest = difflib.get_close_matches(path[-1], known, 1)
        return Fault(key, "no such key", f"Did you mean {nearest[0]}?" if nearest else "Leave it out.")
    if error["type"] == "missing":
        return Fault(key, "missing", "Give it; every constant has a value, a source and a confidence.")
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    shown = "" if isinstance(given, dict | list | BaseModel) else f" ({given!r} given)"
    return Fault(key, message[0].lower() + message[1:] + shown, "Mend that value.")
