"""Where documents come from: the files of a source, and the texts in them, in the same order on every machine."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import DataSection

PATTERNS = {
    "text": ("*",),
    "jsonl": ("*.jsonl", "*.jsonl.gz"),
    "parquet": ("*.parquet",),
    "dataset": ("*",),
    "tokens": ("*.npy",),
}
NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Source:
    """One corpus's files, found and in order."""

    kind: str
    key: str
    """The recipe's key that names it, for faults."""
    path: Path
    """The file or folder that was given; for `stdlib` the standard library's folder."""
    files: tuple[Path, ...]
    """Every file that decides its content, in the order of their paths."""
    text_field: str
    """The column that holds the text."""

    def fault(self, says: str, mend: str) -> InputError:
        """An error about this source, under the key that names it."""
        return InputError([Fault(self.key, says, mend)])


def find_source(data: DataSection, path: str | None) -> Source:
    """The source that `data` describes; `path` is one of `data.sources`, or None for the only one.

    Raises InputError where there is nothing, or no file of that kind.
    """
    key = "data.path" if path is None else "data.sources"
    given = path or data.path
    if data.kind == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _sorted_files(root, ("*.py",), passed_over=NOT_SOURCE)
        key, mend = (
            "data.kind",
            "This Python comes without its source: set data.kind and data.path to text of your own.",
        )
    else:
        assert given is not None, "the recipe makes sure of a path"
        root = Path(given)
        if not root.exists():
            raise InputError([Fault(key, f"{root} does not exist", "Give the file or folder that holds the data.")])
        files = [root] if root.is_file() else _sorted_files(root, PATTERNS[data.kind])
        mend = f"data.kind = {data.kind!r} reads {' and '.join(PATTERNS[data.kind])}."
    if not files:
        raise InputError([Fault(key, f"{root} holds no file to read", mend)])
    return Source(data.kind, key, root, tuple(files), data.text_field)


def read_documents(source: Source) -> Iterator[str]:
    """The text of each document, empty ones included, in order. Raises InputError at the first that cannot be read."""
    if source.kind in ("stdlib", "text"):
        return _whole_files(source)
    if source.kind == "jsonl":
        return _json_lines(source)
    if source.kind == "parquet":
        return _parquet_rows(source)
    return _dataset_rows(source)


def _whole_files(source: Source) -> Iterator[str]:
    """Each file as one document. The standard library has a few files in other encodings, which are left out."""
    for path in source.files:
        try:
            yield path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            if source.kind != "stdlib":
                raise source.fault(f"{path} is not UTF-8 ({error})", "Convert it, or take it out.") from None


def _json_lines(source: Source) -> Iterator[str]:
    """The text column of each line.

    Lines come through `datasets`, which unpacks compressed files. They are parsed one by one, because its own JSON
    reader wants every column to have one type throughout, even those that are not asked for.
    """
    import datasets  # a second and a half

    for path in source.files:
        with _naming(source, path):
            rows = datasets.load_dataset("text", data_files=[_literal(path)], split="train", streaming=True)
            for number, line in enumerate(_values(rows, "text"), 1):
                if line.strip():
                    yield _json_text(source, f"{path} line {number}", line)


def _json_text(source: Source, place: str, line: str) -> str:
    """The text in one line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise source.fault(f"{place} is not JSON ({error})", "Mend the line, or take it out.") from None
    columns = list(row) if isinstance(row, dict) else []
    if source.text_field not in columns:
        raise _no_column(source, place, columns)
    return _text(source, place, row[source.text_field])


def _parquet_rows(source: Source) -> Iterator[str]:
    """The text column of each row; other columns are not read."""
    import datasets

    column = source.text_field
    for path in source.files:
        with _naming(source, path):
            rows = datasets.load_dataset(
                "parquet", data_files=[_literal(path)], columns=[column], split="train", streaming=True
            )
            for value in _values(rows, column):
                yield _text(source, str(path), value)


def _dataset_rows(source: Source) -> Iterator[str]:
    """The text column of each row of a dataset written by `save_to_disk`."""
    import datasets

    with _naming(source, source.path):
        rows = datasets.load_from_disk(str(source.path))
        if isinstance(rows, datasets.DatasetDict):
            splits = ", ".join(str(source.path / str(name)) for name in rows)
            raise source.fault(f"{source.path} holds several splits", f"Give the folder of one of them: {splits}.")
        if source.text_field not in rows.column_names:
            raise _no_column(source, str(source.path), rows.column_names)
        for value in _values(rows.select_columns(source.text_field), source.text_field):
            yield _text(source, str(source.path), value)


def _values(rows: Any, column: str) -> Iterator[Any]:
    """One column of a dataset, row by row."""
    for batch in rows.iter(batch_size=ROWS_AT_ONCE):
        yield from batch[column]


@contextmanager
def _naming(source: Source, path: Path) -> Iterator[None]:
    """Whatever `datasets` raises becomes a fault that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:  # pyarrow's own errors are among the ValueErrors
        mend = f"Give data that fit data.kind = {source.kind!r}."
        raise source.fault(f"{path} cannot be read ({error})", mend) from error


def _text(source: Source, place: str, value: Any) -> str:
    """A cell as text; a missing one is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        says = f"{place}: {source.text_field!r} holds {type(value).__name__}, not text"
        raise source.fault(says, "Set data.text_field to a column of text.")
    return value


def _no_column(source: Source, place: str, columns: list[str]) -> InputError:
    says = f"{place} has no column {source.text_field!r}"
    return source.fault(says, f"Set data.text_field to one of: {', '.join(columns) or 'none here'}.")


def _sorted_files(folder: Path, patterns: tuple[str, ...], passed_over: frozenset[str] = frozenset()) -> list[Path]:
    """The files below a folder that match, ordered by their path below it; hidden ones and some folders left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in passed_over]
        found += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") and any(fnmatch(name, pattern) for pattern in patterns)
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _literal(path: Path) -> str:
    """A path as `datasets` wants it: it takes every path for a pattern."""
    return glob.escape(str(path.absolute()))
