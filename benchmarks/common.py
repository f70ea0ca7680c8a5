"""What every benchmark does: say on what it ran, and keep its figures as a file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/NAME.json`: the figures with commit, command and machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {"commit": commit(), "command": command(), "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    path.write_text(json.dumps({**about, **figures}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def commit() -> str:
    """The commit that is checked out, with `+changes` where the tree differs from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "../benchmarks/*.py")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """The command line, from the script's name on."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Processor, cores, and the versions that timings depend on; no names or paths."""
    import torch

    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
