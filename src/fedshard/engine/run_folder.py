"""A run's folder on disk: what is in it is a contract that reports and comparisons read."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import fedshard
from fedshard.core.errors import Fault, InputError
from fedshard.engine.rows import Row, Summary, as_dict, as_json

FILES = ("metrics", "rounds", "evals")


class RunFolder:
    """`recipe.toml`, `environment.json`, the JSONL files and `summary.json` of one run; written by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def create(path: Path, recipe_text: str, environment: dict[str, Any]) -> RunFolder:
        """A new folder. Raises InputError if there is one already, or it cannot be made."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise InputError([Fault(str(path), "exists already", "Give another folder with --into DIR.")]) from None
        except OSError as error:
            raise InputError([Fault(str(path), f"cannot be made ({error})", "Give another with --into DIR.")]) from None
        (path / "recipe.toml").write_text(recipe_text, encoding="utf-8")
        (path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        return RunFolder(path)

    def append(self, name: Literal["metrics", "rounds", "evals"], row: Row) -> None:
        """One whole line more, on disk when this returns."""
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(as_json(row) + "\n")

    def write_summary(self, summary: Summary) -> None:
        """The run is done."""
        (self.path / "summary.json").write_text(json.dumps(as_dict(summary), indent=2) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def describe_environment(ranks: int, device: torch.device, hosts: list[str]) -> dict[str, Any]:
    """What a run ran on. Holds no environment variables: they may hold secrets."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "fedshard": fedshard.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "ranks": ranks,
        "device": device.type,
        "device_name": name,
        "hosts": hosts,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _commit() -> str | None:
    """The commit of the checkout that fedshard runs from, if it is one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
