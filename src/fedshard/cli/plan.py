"""`fedshard plan`: which layout, which batch, which H, does it fit, how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fedshard.cli.words import Words, read_words
from fedshard.core.errors import Fault, InputError, RunError

if TYPE_CHECKING:
    from fedshard.core.topology import Cluster
    from fedshard.study.choice import Choice, Wanted

FLAGS = {
    "--model": "NAME|PATH",
    "--cluster": "NAME|C.toml",
    "--gpus": "N",
    "--sequence-length": "N",
    "--tokens": "N",
    "--max-batch-tokens": "N",
    "--min-rounds": "N",
    "--precision": "P",
    "--rows": "N",
    "--write": "R.toml",
    "--json": "",
    "--help": "",
}
COUNTS = ("--gpus", "--sequence-length", "--tokens", "--max-batch-tokens", "--min-rounds", "--rows")
NEEDED = ("--model", "--cluster", "--gpus")

HELP = """\
usage: fedshard plan --model NAME|PATH --cluster NAME|C.toml --gpus N [options]

Tries every layout, micro-batch, accumulation, recomputation and H that fits the devices' memory, and ranks them by
tokens per second, with FSDP and HSDP at their best beside them. It ranks speed, not quality: say how large a batch may
be, and how few rounds a run may have.

  --model M             a known model's name, a config.json, or a folder that holds one
  --cluster C           a cluster's name, or its file (`fedshard probe` writes one)
  --gpus N              ranks
  --sequence-length N   tokens of a sequence (default: 4096, or the model's positions if they are fewer)
  --tokens N            budget of the run (default: 20 for each parameter)
  --max-batch-tokens N  of one optimizer step of one group (default: 4194304)
  --min-rounds N        rounds that a run of several groups must have (default: 50)
  --precision P         mixed: weights, moments and reductions in float32 (default); bfloat16-reductions: gradients are
                        reduced in bfloat16; pure-bfloat16: weights and moments too, which rounds small updates away
  --rows N              rows of the table (default: 8)
  --write R.toml        the first row as a recipe for `fedshard train`
  --json                everything as JSON on stdout

Exit code 1 where nothing fits; stdout then says what is short, by how much, and what would do.
"""


def run(words: Sequence[str]) -> None:
    """The command. Raises RunError where nothing fits, once that is told on stdout."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS, most_paths=0)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    if faults := list(_faults(given)):
        raise InputError(faults)
    from fedshard.cli import plan_output
    from fedshard.core.cluster_file import read_cluster
    from fedshard.study.plan import make_plan
    from fedshard.study.shortage import shortage

    cluster = read_cluster(given.flags["--cluster"])
    plan = make_plan(_wanted(given.flags, cluster))
    as_json = "--json" in given.flags
    if not plan.choices:
        short = shortage(plan, cluster)
        told = json.dumps(plan_output.short_as_json(plan, short), indent=2)
        print(told if as_json else "\n".join(plan_output.short_lines(plan, short)), flush=True)
        raise RunError("no choice fits")
    if "--write" in given.flags:
        _write(Path(given.flags["--write"]), plan.rows[0], given.flags["--model"])
    if as_json:
        print(json.dumps(plan_output.plan_as_json(plan), indent=2))
    else:
        plan_output.show(plan, int(given.flags.get("--rows", "8")))


def _wanted(flags: Mapping[str, str], cluster: Cluster) -> Wanted:
    """Raises InputError where model or cluster cannot be what is asked for."""
    from fedshard.study.architectures import read_architecture
    from fedshard.study.choice import DEFAULT_BATCH_TOKENS, DEFAULT_ROUNDS, Precision, Wanted

    def count(name: str, otherwise: int) -> int:
        return int(flags.get(name, otherwise))

    model = read_architecture(flags["--model"])
    length = count("--sequence-length", min(4096, model.positions or 4096))
    if model.positions is not None and length > model.positions:
        says = f"{length} tokens, and the model has {model.positions} positions"
        raise InputError([Fault("--sequence-length", says, f"Give at most {model.positions}.")])
    precisions: dict[str, Precision] = {name: name for name in get_args(Precision)}
    precision = flags.get("--precision", "mixed")
    if precision not in precisions:
        says = f"{precision!r} is none of {', '.join(precisions)}"
        raise InputError([Fault("--precision", says, "Give one of them.")])
    return Wanted(
        model,
        cluster.job(int(flags["--gpus"])),
        length,
        count("--tokens", 0),
        count("--max-batch-tokens", DEFAULT_BATCH_TOKENS),
        count("--min-rounds", DEFAULT_ROUNDS),
        precisions[precision],
    )


def _write(file: Path, choice: Choice, name: str) -> None:
    """The choice as a recipe for the model of that name or path.

    Raises InputError where the file exists or cannot be written, or where a recipe cannot name the model.
    """
    from fedshard.core.recipe_file import write_recipe
    from fedshard.study.planned_recipe import recipe_of

    if file.exists():
        raise InputError([Fault(str(file), "exists already", "Give another file with --write R.toml.")])
    about = (
        f"# {choice.strategy} {choice.setup.layout} for {choice.setup.cluster.name}, by `fedshard plan`.\n"
        "# Give data of your own (data.kind, data.path, data.tokenizer), and a learning rate for model and batch.\n\n"
    )
    text = about + write_recipe(recipe_of(choice, _model_section(name)))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError([Fault(str(file), f"cannot be written ({error.strerror})", "Give another file.")]) from None


def _model_section(name: str) -> dict[str, Any]:
    """A recipe's model section for a model's name, its folder, or the config.json in it.

    Raises InputError for a file of another name: recipes name folders.
    """
    from fedshard.study.known_models import MODELS

    path = Path(name)
    if path.is_dir() or path.name == "config.json":
        return {"kind": "folder", "path": str(path if path.is_dir() else path.parent)}
    if path.suffix == ".json":
        says = f"a recipe names a model's folder, in which {path.name} would not be found"
        raise InputError([Fault("--write", says, "Call the file config.json, in a folder of its own.")])
    return {"kind": "config", **MODELS[name.lower()]}


def _faults(given: Words) -> Iterator[Fault]:
    """What is no option of this command, what is missing, and what is no count."""
    for word in given.overrides[::2]:
        yield Fault(word, "no such option", "See fedshard plan --help.")
    for name in NEEDED:
        if name not in given.flags:
            yield Fault(name, "missing", f"Write {name} {FLAGS[name]}.")
    for name in COUNTS:
        text = given.flags.get(name, "1").replace("_", "")
        if not (text.isascii() and text.isdecimal()) or int(text) < 1:
            yield Fault(name, f"{given.flags[name]!r} is no number from 1 on", f"Write {name} N.")
