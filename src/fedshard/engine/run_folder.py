"""A run's folder on disk, whose names and keys are a contract that reports and comparisons read.

runs/NAME/
  recipe.toml        complete, as it was resolved
  environment.json   versions, commit, hosts, devices
  metrics.jsonl      one object per step          StepRow
  rounds.jsonl       one per round                RoundRow
  evals.jsonl        one per evaluation           EvalRow
  summary.json       at the end                   Summary
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import fedshard
from fedshard.core.errors import Fault, InputError
from fedshard.engine.rows import EvalRow, RoundRow, Row, StepRow, Summary, to_json

FILES: Mapping[type[Row], str] = {StepRow: "metrics.jsonl", RoundRow: "rounds.jsonl", EvalRow: "evals.jsonl"}
"""The file of each kind of row."""


class RunFolder:
    """The folder of one run, which exists. Only global rank 0 writes to it."""

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def create(path: Path, recipe_text: str, environment: Mapping[str, Any]) -> RunFolder:
        """A new folder. Raises InputError if there is one already, even an empty one, or it cannot be made."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise InputError([Fault(str(path), "exists already", "Give another folder with --into DIR.")]) from None
        except OSError as error:
            raise InputError([Fault(str(path), f"cannot be made ({error})", "Give another with --into DIR.")]) from None
        (path / "recipe.toml").write_text(recipe_text, encoding="utf-8")
        environment_text = json.dumps(environment, indent=2, ensure_ascii=False)
        (path / "environment.json").write_text(environment_text + "\n", encoding="utf-8")
        for name in FILES.values():
            (path / name).touch()  # a run without rounds has an empty rounds.jsonl
        return RunFolder(path)

    @staticmethod
    def reopen(path: Path, recipe_text: str, environment: Mapping[str, Any], step: int) -> RunFolder:
        """The folder of a run that goes on after `step`, without what came later, and with its new recipe.

        What the run ran on before is kept in `environment.json`, under `earlier`.
        """
        folder = RunFolder(path)
        for name in FILES.values():
            (path / name).touch()  # a run that was killed early may not have made them all
        folder.cut_back(step)
        _replace(path / "recipe.toml", recipe_text.encode())
        known = path / "environment.json"
        before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        earlier = [*before.pop("earlier", []), before]
        text = json.dumps({**environment, "resumed_step": step, "earlier": earlier}, indent=2, ensure_ascii=False)
        _replace(path / "environment.json", f"{text}\n".encode())
        return folder

    def append(self, row: Row) -> None:
        """One more line in the row's file, in one write, so that a reader or a killed run sees it whole."""
        with (self.path / FILES[type(row)]).open("ab", buffering=0) as file:
            file.write(f"{to_json(row)}\n".encode())

    def write_summary(self, summary: Summary) -> None:
        """The run is done."""
        _replace(self.path / "summary.json", f"{to_json(summary, indent=2)}\n".encode())

    def cut_back(self, step: int) -> None:
        """Forget what came after `step`, so that a run can go on from there: later rows, a last line that a killed run
        left unfinished, and the summary."""
        for name in FILES.values():
            kept = (line for line in _whole_lines(self.path / name) if json.loads(line)["step"] <= step)
            _replace(self.path / name, b"".join(kept))
        (self.path / "summary.json").unlink(missing_ok=True)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of one of a run's JSONL files, in order, without a last line that a killed run left unfinished."""
    return [json.loads(line) for line in _whole_lines(file)]


def describe_environment(ranks: int, device: torch.device, hosts: Sequence[str]) -> dict[str, Any]:
    """What a run ran on, as `environment.json` has it. Holds no environment variables: they may hold secrets.

    `hosts` in the order of their ranks. `devices`: what this rank runs on, as all ranks do.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "fedshard": fedshard.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
        },
        "commit": find_commit(Path(fedshard.__file__).parent),
        "system": f"{platform.system()} {platform.release()}",
        "ranks": ranks,
        "hosts": list(hosts),
        "devices": {"type": device.type, "name": device_name(device)},
    }


def device_name(device: torch.device) -> str:
    """What the maker calls it; of a CPU, what Linux says of the first."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def find_commit(package: Path) -> str | None:
    """The commit that the files of `package` come from, with `-dirty` behind it if they or others were changed.

    None where they are in no checkout, or in an environment that lies inside the checkout of something else.
    """
    try:
        if not _git(package, "ls-files", "__init__.py"):
            return None
        return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _whole_lines(file: Path) -> list[bytes]:
    """Lines with their ends; one without an end is still being written, or never will be."""
    return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _replace(file: Path, content: bytes) -> None:
    """A reader sees the old content or the new one, never a part."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)
