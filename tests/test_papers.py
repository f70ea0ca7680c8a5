"""The papers keep their word: what README and docs tell people to run does run, and what they state is so.

Blocks are run as they stand, page by page, in a folder that looks like the root of a checkout. Three kinds of command
are not taken in full there: training is cut to a few steps, `pip` does nothing (`.ci/run` installs for real), and
`make` only tells what it would do, because `make test` is what runs this.
"""

import dataclasses
import doctest
import importlib
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import fedshard
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe, read_recipe, write_recipe
from fedshard.core.recipe_keys import all_keys
from fedshard.engine import rows

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
SHORT = "--budget.steps 12 --evaluate.sequences 16 --train.micro_batch 1"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks of these languages, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    each = [Block(f"{name_of(page)}:{text[: m.start()].count(chr(10)) + 1}", m[1], m[2]) for m in found]
    return [block for block in each if block.language in languages]


def run(script: str, folder: Path, environment: dict[str, str], seconds: float = 200) -> str:
    """What a bash script prints, on either stream. It and all that it started end with it, or after so long."""
    words = ["bash", "-euo", "pipefail", "-c", script]
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, f"exit code {process.returncode} of\n{script}\n{output}"
    return output


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> dict[str, str]:
    """An environment in which `fedshard`, `python` and `torchrun` are those of this Python."""
    folder = tmp_path_factory.mktemp("tools")
    shorten = f'case " $* " in *" --dry-run "*) ;; *" train "*) set -- "$@" {SHORT};; esac\n'
    commands = {
        "python": f'exec "{sys.executable}" "$@"',
        "fedshard": f'{shorten}exec "{sys.executable}" -m fedshard "$@"',
        "torchrun": f'{shorten}exec "{sys.executable}" -m torch.distributed.run "$@"',
        "pip": "exit 0",
        "make": f'exec "{shutil.which("make")}" --dry-run "$@"',
    }
    for name, command in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{command}\n")
        (folder / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FEDSHARD_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",  # else torchrun says at length that it sets it so
    }


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder that looks like the root of a checkout, and may be written to."""
    for name in ("README.md", "Makefile", "docs", "examples", "recipes", "src", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash", "console", "python")], ids=name_of)
def test_blocks_run(page, checkout, tools):
    """Python runs as a file; under torchrun, where the first line is a comment that says so."""
    for block in blocks(page, "bash", "console", "python"):
        if block.language == "console":
            check_session(block, checkout, tools)
            continue
        script = block.text
        if block.language == "python":
            first = block.text.partition("\n")[0]
            script = first.removeprefix("# ") if first.startswith("# torchrun") else "python block.py"
            (checkout / script.split()[-1]).write_text(block.text)
        run(script, checkout, tools)


def check_session(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """Lines that begin with `$ ` are run, the others are what they print."""
    mark = "=== command ==="
    commands = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    script = "set +e; status=0\n" + "".join(
        f"echo '{mark}'; (exit $status)\n{command}\nstatus=$?\n" for command in commands
    )
    printed = run(script, folder, environment).split(mark + "\n")[1:]
    session = "".join(f"$ {command}\n{output}" for command, output in zip(commands, printed, strict=True))
    assert session == block.text, block.place


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page, "toml")], ids=lambda block: block.place
)
def test_toml_blocks_are_recipes(block):
    make_recipe(tomllib.loads(block.text))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=name_of)
def test_links_lead_somewhere(page):
    """Those between pages of the docs are checked when the docs are built."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_begins_as_newcomers_need_it():
    """The first block under each of these headings is what a fresh machine runs; `.ci/run` runs the second."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = {
        each: re.search(rf"^## {each}\n.*?^```\w+\n(.*?)^```", text, re.M | re.S) for each in ("Run it", "Test it")
    }
    assert first["Run it"][1].splitlines() == ["pip install .", "fedshard train"]
    assert first["Test it"][1].splitlines()[-1] == "make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_readme_names_the_four_strategies():
    rows = re.findall(r"^\| (\S+) \| (\S+) \| `(--layout.*)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert [name for name, _, _ in rows] == ["FSDP", "HSDP", "FL+FSDP", "FL+HSDP"]
    for name, layout, options in rows:
        shape = read_recipe(overrides=options.split()).shape
        assert (shape.strategy, str(shape)) == (name, layout)


@pytest.mark.parametrize(
    ("heading", "row"),
    [
        ("metrics.jsonl", rows.StepRow),
        ("rounds.jsonl", rows.RoundRow),
        ("evals.jsonl", rows.EvalRow),
        ("summary.json", rows.Summary),
    ],
)
def test_the_run_folders_keys_are_documented(heading, row):
    text = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [field.name for field in dataclasses.fields(row)]


def test_tiny_is_the_defaults_written_out():
    path = ROOT / "recipes/tiny.toml"
    assert read_recipe(path) == Recipe()
    assert "\n".join(path.read_text().splitlines()[2:]) + "\n" == write_recipe(Recipe())


@pytest.mark.parametrize(("name", "strategy"), [("fl-fsdp", "FL+FSDP"), ("fl-hsdp", "FL+HSDP")])
def test_presets_are_what_their_comments_say(name, strategy):
    path = ROOT / f"recipes/{name}.toml"
    recipe = read_recipe(path)
    assert (recipe.strategy, recipe.shape.groups, recipe.shape.group_ranks) == (strategy, 2, 4)
    assert recipe.sync.warmup_fraction > 0
    said = re.findall(r"([\d,]+) (tokens in a group's step|in all|steps|rounds)", path.read_text())
    assert {what: int(number.replace(",", "")) for number, what in said} == {
        "tokens in a group's step": recipe.group_tokens,
        "in all": recipe.tokens_per_step,
        "steps": recipe.steps,
        "rounds": recipe.timetable.rounds(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "paper", "said"),
    [
        ("tiny", "README.md", r"([\d.]+) M parameters"),
        ("tiny", "docs/first-run.md", r"([\d.]+) M parameters"),
        ("fl-fsdp", "recipes/fl-fsdp.toml", r"([\d.]+) M parameters"),
        ("fl-hsdp", "recipes/fl-hsdp.toml", r"([\d.]+) M parameters"),
    ],
)
def test_sizes_of_models_are_right(recipe, paper, said):
    from fedshard.engine.config import read_config
    from fedshard.engine.model import build_on_meta

    model = build_on_meta(read_config(read_recipe(ROOT / f"recipes/{recipe}.toml").model))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    (number,) = re.findall(said, (ROOT / paper).read_text(encoding="utf-8"))
    assert f"{millions:.{len(number.partition('.')[2])}f}" == number


@pytest.mark.slow
def test_the_example_of_a_loop_of_ones_own(checkout, tools):
    lines = (ROOT / "examples/own_loop.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    output = run("torchrun --nproc-per-node 4 examples/own_loop.py", checkout, tools)
    told = re.findall(r"^step (\d+): round (\d+), loss ([\d.]+)", output, re.M)
    assert [(int(step), int(number)) for step, number, _ in told] == [(4, 1), (12, 2), (20, 3), (28, 4), (36, 5)]
    assert float(told[-1][2]) < float(told[0][2]) - 1, "it learns"


@pytest.mark.parametrize("script", sorted((ROOT / "examples/slurm").glob("*.sbatch")), ids=name_of)
def test_batch_files_start_as_many_ranks_as_their_recipe_has(script, tmp_path):
    """With an srun that only prints what it would start."""
    printed = run(f"bash {script}", ROOT, slurm(tmp_path, 'printf "%s\\n" "$@"')).split("\n")[:-1]

    asked = {key: int(value) for key, value in re.findall(r"^#SBATCH --(\S+)=(\d+)$", script.read_text(), re.M)}
    ranks = asked["nodes"] * asked["ntasks-per-node"]
    if "torchrun" in printed:
        given = dict(pairwise(printed))
        assert (given["--nnodes"], given["--rdzv-endpoint"]) == ("2", "node7:16711")
        ranks *= int(given["--nproc-per-node"])
    path, *words = printed[printed.index("train") + 1 :]
    assert words[-4:] == ["--into", "runs/4711", "--resume", "auto"]
    shape = read_recipe(ROOT / path, words[:-4]).shape
    assert ranks == shape.ranks
    assert shape.group_ranks == asked["gpus-per-node"], "a node is a group"


def slurm(folder: Path, srun: str) -> dict[str, str]:
    """The environment of job 4711, with an srun that does what is given, and a scontrol that notes what it requeues."""
    scontrol = f"""[ "$1" = requeue ] && echo "$2" >> "{folder}/requeued" || printf 'node7\\nnode8\\n'"""
    for name, command in {"srun": srun, "scontrol": scontrol}.items():
        (folder / name).write_text(f"#!/bin/sh\n{command}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NODELIST": "node[7-8]"}
    return job | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_job_whose_ranks_were_stopped_by_a_signal_queues_itself_again(tmp_path):
    """Under srun they end with 0 and leave no summary; torchrun ends with 1, and the script has heard the signal."""
    run(f"bash {ROOT}/examples/slurm/srun.sbatch", tmp_path, slurm(tmp_path, "exit 0"))
    assert (tmp_path / "requeued").read_text() == "4711\n"
    waits = f'trap "sleep 0.3; exit 1" USR1; touch "{tmp_path}/ready"; while :; do sleep 0.05; done'
    script = f"""bash {ROOT}/examples/slurm/torchrun.sbatch & job=$!
        while [ ! -f ready ]; do sleep 0.05; done
        kill -USR1 $job; wait $job && exit 1 || [ $? -eq 1 ]"""
    run(script, tmp_path, slurm(tmp_path, waits), seconds=20)
    assert (tmp_path / "requeued").read_text() == "4711\n4711\n"


def test_a_job_that_fails_or_is_done_does_not(tmp_path):
    for script in ("srun", "torchrun"):
        run(f"bash {ROOT}/examples/slurm/{script}.sbatch && exit 1 || true", tmp_path, slurm(tmp_path, "exit 1"))
    (tmp_path / "runs/4711").mkdir(parents=True)
    (tmp_path / "runs/4711/summary.json").write_text("{}")
    for script in ("srun", "torchrun"):
        run(f"bash {ROOT}/examples/slurm/{script}.sbatch", tmp_path, slurm(tmp_path, "exit 0"))
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_docs_build_without_a_warning(tmp_path, tools):
    run(f'python -m sphinx -W --keep-going -q -b html -d "{tmp_path}/trees" docs "{tmp_path}/html"', ROOT, tools)
    reference = (tmp_path / "html/recipe.html").read_text(encoding="utf-8")
    kinds = {"model.kind", "sync.outer.kind"}  # these are headings, with their values
    assert [key for key in all_keys() if f">{key}<" not in reference and key not in kinds] == []


@pytest.mark.slow
def test_figures_are_what_their_scripts_draw(tmp_path, tools):
    run(f"python docs/figures/round.py {tmp_path}", ROOT, tools)
    drawn, kept = (tmp_path / "round.svg").read_text(), (ROOT / "docs/figures/round.svg").read_text()
    for what in (r"<text[^>]*>([^<]*)<", r"fill: (#\w+)"):  # words and colours: lengths depend on matplotlib's version
        assert re.findall(what, drawn) == re.findall(what, kept) != []


@pytest.mark.parametrize(
    ("paper", "said"),
    [("pyproject.toml", r'^version = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$"), ("CHANGELOG.md", r"^## (\S+)")],
)
def test_papers_name_this_version(paper, said):
    assert re.findall(said, (ROOT / paper).read_text(encoding="utf-8"), re.M)[0] == fedshard.__version__


MODULES = [each.name for each in pkgutil.walk_packages(fedshard.__path__, "fedshard.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
