"""Every kind of input gives the documents or sequences it holds; what cannot be read is refused by name."""

import gzip
import json

import numpy as np
import pytest
from corpora import SEPARATOR, TEXTS, faults, prepared, section, write_texts, write_tokenizer

from fedshard.core.errors import InputError
from fedshard.core.recipe import DataSection
from fedshard.engine.sources import find_source


def test_stdlib_is_split_by_file_and_needs_nothing(tmp_path):
    data = DataSection()
    corpus = prepared(data, tmp_path / "cache")
    assert corpus.train.shape[1] == corpus.eval.shape[1] == 256
    assert corpus.separator == SEPARATOR
    names = [path.as_posix() for path in find_source(data, None).files]
    assert len(names) > 300
    assert not any(part in name for part in ("/site-packages/", "/test/", "/tests/") for name in names)
    assert corpus.documents <= len(names)
    assert corpus.dropped_tokens < 2 * 256
    assert prepared(data, tmp_path / "other").fingerprint == corpus.fingerprint


@pytest.mark.slow
def test_every_kind_of_text_gives_the_same_corpus(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = [{"text": text, "other": number if number % 2 else {"nested": []}} for number, text in enumerate(TEXTS)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_texts(tmp_path / "texts")
    odd = tmp_path / "odd [name] *"  # a path is a path, never a pattern
    odd.mkdir()
    (odd / "1.jsonl").write_text("".join(lines[:7]) + '\n{"text": null}\n{"text": ""}\n', encoding="utf-8")
    with gzip.open(odd / "2.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines[7:])
    table = datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(40))})
    table.select(range(9)).to_parquet(str(odd / "1.parquet"))
    table.select(range(9, 40)).to_parquet(str(odd / "2.parquet"))
    table.save_to_disk(str(tmp_path / "disk"))
    sections = [
        section(tmp_path / "texts"),
        section(odd, "jsonl"),
        section(odd, "parquet"),
        section(tmp_path / "disk", "dataset"),
    ]
    corpora = [prepared(data, tmp_path / "cache") for data in sections]
    assert [corpus.documents for corpus in corpora] == [40] * 4
    assert len({corpus.fingerprint for corpus in corpora}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x.jsonl line 2 is not JSON"),
        ("x.jsonl", b'{"body": "a"}\n', r"x.jsonl line 1 has no column 'text'\. .*: body"),
        ("x.jsonl", b"[1]\n", "x.jsonl line 1 has no column 'text'"),
        ("x.jsonl", b'{"text": 3}\n', "x.jsonl line 1: 'text' holds int, not text"),
        ("x.jsonl", b'{"text": "\xe9"}\n', "x.jsonl cannot be read"),
        ("x.jsonl", b"", "holds 0 documents"),
        ("x.parquet", b"PAR", "x.parquet cannot be read"),
        ("x.arrow", b"", "neither a `Dataset` directory"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    kind = "dataset" if name.endswith("arrow") else name[2:]
    with pytest.raises(InputError, match=says):
        prepared(section(tmp_path, kind), tmp_path / "cache")


@pytest.mark.slow
def test_datasets_are_refused_for_what_they_lack(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"body": TEXTS, "number": list(range(40))})
    table.save_to_disk(str(tmp_path / "one"))
    table.to_parquet(str(tmp_path / "x.parquet"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "two"))
    [fault] = faults(section(tmp_path / "one", "dataset"), tmp_path / "cache")
    assert (fault.says, fault.mend) == (
        f"{tmp_path / 'one'} has no column 'text'",
        "Set data.text_field to one of: body, number.",
    )
    assert prepared(section(tmp_path / "one", "dataset", text_field="body"), tmp_path / "cache").documents == 40
    assert "not text" in faults(section(tmp_path / "one", "dataset", text_field="number"), tmp_path / "cache")[0].says
    assert str(tmp_path / "two" / "train") in faults(section(tmp_path / "two", "dataset"), tmp_path / "cache")[0].mend
    assert "x.parquet cannot be read" in faults(section(tmp_path / "x.parquet", "parquet"), tmp_path / "cache")[0].says


def test_a_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    texts = write_texts(tmp_path / "texts")
    (texts / "001.txt").write_bytes(b"\xe9")
    assert str(texts / "001.txt") in faults(section(texts), tmp_path / "cache")[0].says


def test_hidden_files_are_not_read(tmp_path):
    texts = write_texts(tmp_path / "texts")
    (texts / ".DS_Store").write_bytes(b"\xff")
    (texts / ".git").mkdir()
    (texts / ".git" / "index").write_bytes(b"\xff")
    assert prepared(section(texts), tmp_path / "cache").documents == 40


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "dataset", "tokens"])
def test_missing_and_empty_data_are_refused_by_path(kind, tmp_path):
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    [fault] = faults(section(missing, kind), tmp_path / "cache")
    assert (fault.key, fault.says) == ("data.path", f"{missing} does not exist")
    [fault] = faults(section(empty, kind), tmp_path / "cache")
    assert (fault.key, fault.says) == ("data.path", f"{empty} holds no file to read")


def test_given_sequences_stay_as_they_are(tmp_path):
    rows = np.arange(20 * 8).reshape(20, 8)
    np.save(tmp_path / "1.npy", rows[:5])
    np.save(tmp_path / "2.npy", rows[5:].astype(np.uint16))
    corpus = prepared(section(tmp_path, "tokens"), tmp_path / "cache", vocab_size=160)
    assert (len(corpus.train), len(corpus.eval), corpus.dropped_tokens) == (16, 4, 0)
    assert np.array_equal(np.sort(np.concatenate([corpus.train, corpus.eval]), axis=0), rows)


def test_streams_are_joined_cut_and_split_by_sequence(tmp_path):
    np.save(tmp_path / "1.npy", np.arange(13))
    np.save(tmp_path / "2.npy", np.arange(13, 43))
    corpus = prepared(section(tmp_path, "tokens"), tmp_path / "cache", vocab_size=43)
    assert (len(corpus.train), len(corpus.eval), corpus.dropped_tokens) == (4, 1, 3)
    both = np.concatenate([corpus.train, corpus.eval])
    assert np.array_equal(np.sort(both, axis=0), np.arange(40).reshape(5, 8))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ([np.zeros((3, 7), int)], "sequences of 7 tokens, and data.sequence_length is 8"),
        ([np.zeros((3, 8))], "holds float64"),
        ([np.zeros((3, 8, 2), int)], "in 3 dims"),
        ([np.full((3, 8), -1)], "holds the id -1"),
        ([np.zeros((3, 8), int), np.zeros(64, int)], "streams and arrays of sequences"),
        ([np.zeros((3, 8), int), np.zeros((0, 8), int)], "1.npy is empty"),
        ([np.array([{}])], "is no .npy array"),
        ([np.zeros(15, int)], "holds 1 sequences, and train and eval need at least one each"),
    ],
)
def test_arrays_that_are_no_sequences_are_refused(arrays, says, tmp_path):
    for number, each in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", each)
    [fault] = faults(section(tmp_path, "tokens"), tmp_path / "cache")
    assert fault.key == "data.path"
    assert says in fault.says


def test_arrays_know_their_separator_by_the_tokenizer_they_were_made_with(tmp_path):
    np.save(tmp_path / "ids.npy", np.full(80, 300))
    path, cache = tmp_path / "ids.npy", tmp_path / "cache"
    assert prepared(section(path, "tokens"), cache, vocab_size=301).separator is None
    [fault] = faults(section(path, "tokens", isolate_documents=True), cache, vocab_size=301)
    assert fault.key == "data.isolate_documents"
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    data = section(path, "tokens", isolate_documents=True, tokenizer=tokenizer)
    assert prepared(data, cache, vocab_size=301).separator == 5
