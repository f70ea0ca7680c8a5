"""What the winner's layout would gain by what a plan does not choose by itself: numbers of lower precision, codecs,
and overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedshard.study.bands import Band, Rates, rates, speedup
from fedshard.study.choice import Choice, Precision
from fedshard.study.plan import Plan, search
from fedshard.study.setup import Setup


@dataclass(frozen=True)
class WhatIf:
    """One such way: its best choice in the layout, and how much it gains over the row without it."""

    name: str
    needs: str
    """The words that ask for it, or that this version does not have it."""
    row: Choice
    """The row without it."""
    choice: Choice | None
    """None where it does not fit."""
    gain: Band | None


LOWER: Mapping[str, Precision] = {"reductions in bfloat16": "bfloat16-reductions", "pure bfloat16": "pure-bfloat16"}
"""What a plan may be asked for, by name: it changes the numbers that are trained, so it is never chosen unasked."""

UNBUILT: Mapping[str, Mapping[str, Any]] = {
    "codec bf16": {"codec": "bf16", "anchor": True},
    "codec int8": {"codec": "int8", "anchor": True},
    "overlap of one step": {"delay": 1, "anchor": True},
}
"""What recipes cannot ask for yet (`core.recipe_file.NOT_BUILT`), by name: changes of a setup."""


def what_ifs(plan: Plan) -> Iterator[WhatIf]:
    """For the first row, lower precisions; for the first row with rounds, codecs and overlap."""
    winner, mixed = plan.rows[0], plan.wanted.precision == "mixed"
    if mixed:
        plain = rates([winner])
        for name, precision in LOWER.items():
            wanted = replace(plan.wanted, precision=precision)
            base = wanted.setup(winner.setup.layout)
            yield _what_if(Plan(wanted), base, winner, plain, (name, f"--precision {precision}"))
    with_rounds = next((row for row in plan.rows if row.setup.layout.groups > 1), None)
    if with_rounds is not None:
        plain = rates([with_rounds])
        for name, change in UNBUILT.items():
            base = replace(plan.wanted.setup(with_rounds.setup.layout), **change)
            yield _what_if(Plan(plan.wanted), base, with_rounds, plain, (name, "not in this version"))


def _what_if(made: Plan, base: Setup, row: Choice, plain: Rates, called: tuple[str, str]) -> WhatIf:
    """The best choice of one layout done as `base` says, over `row`, whose rates are `plain`."""
    name, needs = called
    made.choices += search(made, base)
    if not made.choices:
        return WhatIf(name, needs, row, None, None)
    best = made.rows[0]
    return WhatIf(name, needs, row, best, speedup(rates([best]), plain))
