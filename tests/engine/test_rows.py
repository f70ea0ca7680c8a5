"""The keys of a run's files, and numbers that come back from them as they went in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from example_rows import EVALUATION, ROUND, STEP, SUMMARY
from hypothesis import given
from hypothesis import strategies as st

from fedshard.engine.rows import EvalRow, Row, Summary, to_json


def strictly(text: str) -> dict[str, Any]:
    """An object as a reader that keeps to the standard sees it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (STEP, "step tokens loss group_losses learning_rate grad_norms tokens_per_second seconds"),
        (
            ROUND,
            "round step tokens sent_bytes seconds exposed_seconds delta_norm group_delta_norms agreement spread "
            "weights excluded",
        ),
        (EVALUATION, "step tokens loss perplexity sequences"),
        (
            SUMMARY,
            "strategy layout tokens steps rounds seconds tokens_per_second steady_tokens_per_second train_loss "
            "eval_loss eval_perplexity round_sent_bytes peak_memory_bytes rss_bytes",
        ),
    ],
    ids=["step", "round", "evaluation", "summary"],
)
def test_keys_are_the_contracts(row: Row | Summary, keys: str):
    assert list(strictly(to_json(row))) == keys.split()


def test_extra_keys_come_with_a_value_only():
    step = strictly(to_json(replace(STEP, inner_seconds=0.25, mfu=0.0)))
    assert (step["inner_seconds"], step["mfu"]) == (0.25, 0.0)  # nothing achieved is a value too
    assert "router_loss" not in step
    assert strictly(to_json(replace(SUMMARY, router_loss=0.01, mfu=0.4)))["mfu"] == 0.4


def test_a_key_of_the_contract_stays_without_a_value():
    assert strictly(to_json(ROUND))["delta_norm"] is None


@pytest.mark.parametrize("row", [STEP, ROUND, EVALUATION, SUMMARY, replace(STEP, inner_seconds=0.1, router_loss=1e-9)])
def test_rows_come_back_equal(row: Row | Summary):
    assert type(row)(**strictly(to_json(row))) == row


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_comes_back_with_the_same_bits(number: float):
    back = EvalRow(**strictly(to_json(replace(EVALUATION, loss=number))))
    assert back.loss.hex() == number.hex()


def test_what_is_not_finite_is_null():
    step = strictly(to_json(replace(STEP, loss=math.nan, grad_norms=[math.inf, 0.5])))
    assert step["loss"] is None
    assert step["grad_norms"] == [None, 0.5]


def test_a_row_is_one_line():
    assert "\n" not in to_json(SUMMARY)
    assert "2×1×2" in to_json(SUMMARY)
