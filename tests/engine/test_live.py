"""What the terminal shows while a run trains, and the result."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from example_rows import EVALUATION, ROUND, STEP, SUMMARY
from rich.console import Console

from fedshard.engine.live import LiveSink, print_summary
from fedshard.engine.rows import Progress, to_json

PROGRESS = Progress(step=12, steps=196, loss=3.2704, tokens_per_second=8123.4, next_round=20, eta_seconds=75.0)
LINE = "step 12/196 | loss 3.270 | 8.12 k tokens/s | round after step 20 | 1:15 left"


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, force_interactive=True, width=100, color_system=None), file


def pipe() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=False, width=40), file  # narrower than a line: it must not be wrapped


def test_a_terminal_has_one_line_that_is_drawn_anew():
    console, file = terminal()
    sink = LiveSink(every=1, console=console)
    for step in range(1, 13):
        sink.progress(replace(PROGRESS, step=step))
    sink.close()
    assert LINE in file.getvalue()
    assert file.getvalue().count("\n") <= 1


def test_what_matters_stays_above_the_live_line():
    console, file = terminal()
    sink = LiveSink(every=1, console=console)
    sink.progress(PROGRESS)
    sink.round(replace(ROUND, excluded=[1]))
    sink.evaluation(EVALUATION)
    sink.close()
    assert "round 2 after step 7: without group 1\n" in file.getvalue()
    assert "step 7: evaluation loss 2.0000, perplexity 7.389\n" in file.getvalue()


def test_a_narrow_terminal_gets_no_second_line():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, width=30, color_system=None)
    sink = LiveSink(every=1, console=console)
    sink.progress(PROGRESS)
    sink.close()
    assert "…" in file.getvalue()
    assert file.getvalue().count("\n") <= 1


def test_a_pipe_gets_a_line_every_so_many_steps_and_the_last():
    console, file = pipe()
    sink = LiveSink(every=4, console=console)
    for step in range(1, 11):
        sink.progress(replace(PROGRESS, step=step, steps=10, next_round=None))
    sink.close()
    assert file.getvalue().splitlines() == [
        f"step {step}/10 | loss 3.270 | 8.12 k tokens/s | 1:15 left" for step in (4, 8, 10)
    ]


def test_a_pipe_gets_the_line_unwrapped_and_without_colour():
    console, file = pipe()
    LiveSink(every=4, console=console).progress(PROGRESS)
    assert file.getvalue() == f"{LINE}\n"


def test_groups_that_were_left_out_and_steps_that_were_not_applied_are_told():
    console, file = pipe()
    sink = LiveSink(every=1000, console=console)
    sink.step(STEP)
    sink.step(replace(STEP, grad_norms=[math.nan, 0.5]))
    sink.step(replace(STEP, grad_norms=[math.inf, math.nan]))
    sink.round(ROUND)
    sink.round(replace(ROUND, excluded=[0, 3]))
    assert file.getvalue().splitlines() == [
        "step 7: gradient not finite, step not applied in group 0",
        "step 7: gradient not finite, step not applied in groups 0, 1",
        "round 2 after step 7: without groups 0, 3",
    ]


def test_the_live_line_is_talk_and_goes_to_stderr(capsys: pytest.CaptureFixture[str]):
    sink = LiveSink(every=1)
    sink.progress(PROGRESS)
    sink.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{LINE}\n")


def test_the_result_is_plain_lines_on_stdout(capsys: pytest.CaptureFixture[str]):
    print_summary(SUMMARY, federated=True, fsdp_bytes=247_782_400, as_json=False)
    out, err = capsys.readouterr()
    assert err == ""
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert values["strategy"] == "FL+FSDP 2×1×2"
    assert values["evaluation perplexity"] == "7.389 (loss 2.0000)"
    assert values["tokens/s"] == "8.03 k (steady 8.50 k)"
    assert values["rounds"] == "19, each 2.48 MB per rank to other groups"
    assert values["FSDP over all ranks"] == "248 MB in the same steps: 100 times as much"
    assert values["peak memory per rank"] == "79.2 MB of tensors (900 MB resident)"


def test_the_result_is_a_table_on_a_terminal():
    console, file = terminal()
    print_summary(SUMMARY, federated=True, fsdp_bytes=247_782_400, as_json=False, console=console)
    assert "FL+FSDP 2×1×2" in file.getvalue()
    assert "│ evaluation perplexity" in file.getvalue()


def test_the_result_for_machines_is_the_summary_file(capsys: pytest.CaptureFixture[str]):
    print_summary(SUMMARY, federated=True, fsdp_bytes=1, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(to_json(SUMMARY))


def test_without_rounds_nothing_is_said_of_them(capsys: pytest.CaptureFixture[str]):
    print_summary(replace(SUMMARY, rounds=0, round_sent_bytes=0), federated=False, fsdp_bytes=9, as_json=False)
    assert "FSDP over all ranks" not in capsys.readouterr().out


def test_rounds_of_a_single_group_send_nothing(capsys: pytest.CaptureFixture[str]):
    print_summary(replace(SUMMARY, round_sent_bytes=0), federated=True, fsdp_bytes=0, as_json=False)
    out = capsys.readouterr().out
    assert "19, each 0 B per rank to other groups" in out
    assert "FSDP over all ranks" not in out


def test_without_fsdps_bytes_nothing_is_compared(capsys: pytest.CaptureFixture[str]):
    print_summary(SUMMARY, federated=True, fsdp_bytes=None, as_json=False)
    out = capsys.readouterr().out
    assert "19, each 2.48 MB per rank to other groups" in out
    assert "FSDP over all ranks" not in out


def test_what_is_known_of_some_runs_only(capsys: pytest.CaptureFixture[str]):
    print_summary(replace(SUMMARY, mfu=0.4123, router_loss=0.0213), federated=False, fsdp_bytes=0, as_json=False)
    out = capsys.readouterr().out
    assert "41.2%" in out
    assert "0.0213" in out
