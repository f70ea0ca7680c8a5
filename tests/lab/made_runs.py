"""Run folders made by hand, whose every number can be worked out, for tests of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from fedshard.core.recipe_file import read_recipe, write_recipe

FSDP = ("--layout.groups", "1", "--layout.shards", "4")
HSDP = ("--layout.groups", "1", "--layout.replicas", "2", "--layout.shards", "2")
FL_FSDP = ("--layout.groups", "2", "--layout.shards", "2")
FL_HSDP = ("--layout.groups", "2", "--layout.replicas", "2", "--layout.shards", "1")

ENVIRONMENT = {"commit": "c0ffee", "ranks": 4, "hosts": ["a", "b"], "devices": {"type": "cpu", "name": "Abacus"}}


def make_run(
    folder: Path,
    words: Sequence[str],
    *,
    seconds: float,
    losses: Sequence[float],
    every: int = 4,
    done: bool = True,
) -> Path:
    """A run of `every` · len(losses) steps of so many seconds, evaluated to these losses, one after each `every` steps.

    If it federates, rounds of half a second come before the evaluations. Of step 5 a quarter was communication.
    """
    folder.mkdir(parents=True)
    steps = every * len(losses)
    set_words = ["--budget.steps", str(steps), "--sync.every", str(every), "--sync.warmup_fraction", "0"]
    recipe = read_recipe(overrides=[*words, *set_words])
    (folder / "recipe.toml").write_text(write_recipe(recipe))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    speed, groups = recipe.tokens_per_step / seconds, recipe.layout.groups
    metrics, rounds, evals = [], [], []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": step * recipe.tokens_per_step}
        sampled = {"inner_seconds": seconds / 4} if step == 5 else {}
        metrics.append(
            {**common, "loss": 5.0 - step / steps, "seconds": seconds, "tokens_per_second": speed, **sampled}
        )
        if step % every == 0:
            loss = losses[step // every - 1]
            evals.append({**common, "loss": loss, "perplexity": math.exp(loss), "sequences": 8})
            if groups > 1:
                rounds.append(common | make_round(step // every, groups, anchor=recipe.sync.anchor))
    for name, lines in {"metrics": metrics, "rounds": rounds, "evals": evals}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        total = steps * seconds + 0.5 * len(rounds)
        tokens_per_second = steps * recipe.tokens_per_step / total
        summary = {"seconds": total, "tokens_per_second": tokens_per_second, "steady_tokens_per_second": speed}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def make_round(number: int, groups: int, *, anchor: bool) -> dict[str, object]:
    """A line of rounds.jsonl, but for step and tokens. Group g is g + 1 away from the anchor, or from the mean."""
    away = [float(group + 1) for group in range(groups)]
    return {
        "round": number,
        "sent_bytes": 1000,
        "seconds": 0.5,
        "exposed_seconds": 0.5,
        "delta_norm": 1.2 if anchor else None,
        "group_delta_norms": away if anchor else None,
        "agreement": 1.2 if anchor else None,
        "spread": None if anchor else away,
        "weights": [1 / groups] * groups,
        "excluded": [],
    }
