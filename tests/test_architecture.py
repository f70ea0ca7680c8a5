"""The house keeps its shape: what may import what, how large rooms are, and one word for each thing."""

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/fedshard").rglob("*.py"))
EVERYTHING = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]

LARGEST_FILE = 320  # lines that are not blank
LARGEST_FUNCTION = 60  # lines, docstring and all

SYNONYMS = {
    "worker": "rank",
    "client": "group",
    "silo": "group",
    "island": "group",
    "cohort": "group",
    "participant": "group",
    "pod": "cell",
    "partition": "shard",
    "aggregation": "round",
    "aggregate": "round",
    "pseudo": "delta",
    "pseudogradient": "delta",
    "compressor": "codec",
}
"""Words of the literature, and the one that is used here instead."""


@pytest.mark.slow
def test_imports_keep_their_contracts(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    broken = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert not broken, capsys.readouterr().out


def loaded_by(code: str) -> tuple[set[str], float]:
    """The modules that some code leaves loaded in a fresh Python, and the processor's seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return set(done.stderr.split()), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "code",
    [
        "import fedshard; fedshard.__version__; dir(fedshard)",
        "from fedshard.cli.main import dispatch; dispatch(['--help'])",
        "from fedshard.cli.main import dispatch; dispatch(['train', '--help'])",
        "from fedshard.core.recipe_file import read_recipe; read_recipe()",
    ],
)
def test_what_needs_no_torch_does_not_load_it(code):
    loaded, _ = loaded_by(code)
    assert "fedshard" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "datasets"}


def test_help_is_there_at_once():
    """Under half a second; of the processor, because a busy machine makes any wall clock late."""
    fastest = min(loaded_by("from fedshard.cli.main import dispatch; dispatch(['--help'])")[1] for _ in range(3))
    assert fastest < 0.5


def test_public_names_are_sorted_and_exist():
    import fedshard

    assert fedshard.__all__ == sorted(fedshard.__all__)
    assert all(getattr(fedshard, name) for name in fedshard.__all__)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rooms_are_small(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= LARGEST_FILE
    large = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= LARGEST_FUNCTION
    }
    assert large == {}


def own_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that a file gives by itself, with their lines: of modules, functions, classes, arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_word_for_each_thing(path):
    names = [(1, path.stem), *own_names(ast.parse(path.read_text(encoding="utf-8")))]
    wrong = [
        f"line {line}: {name} ({word} is called {SYNONYMS[word]} here)"
        for line, name in names
        for word in words_of(name)
        if word in SYNONYMS
    ]
    assert wrong == []


def words_of(name: str) -> list[str]:
    """The words of a name, in the singular.

    >>> words_of("_all_workers"), words_of("ClientSampler")
    (['all', 'worker'], ['client', 'sampler'])
    """
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return [part.lower().removesuffix("s") for part in parts]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_room_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_the_environment_is_read_in_two_places_only():
    readers = {
        path.relative_to(ROOT / "src/fedshard").as_posix()
        for path in SOURCES
        if re.search(r"os\.environ|os\.getenv", path.read_text(encoding="utf-8"))
    }
    assert {name for name in readers if not name.startswith("cli/")} == {"engine/world.py"}
