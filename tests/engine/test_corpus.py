"""Split by document, packed, cached: whole documents on one side, tokenised once, known by a fingerprint."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import SEPARATOR, TEXTS, WORDS, faults, prepared, section, write_texts, write_tokenizer

from fedshard.core.layout import Layout
from fedshard.engine import corpus as corpus_module
from fedshard.engine.data import Feed, eval_batches
from fedshard.engine.tokenise import held_out


def documents_in(sequences):
    """The documents in some sequences of bytes, but for what follows the last separator."""
    ids = sequences.reshape(-1)
    pieces = np.split(ids, np.flatnonzero(ids == SEPARATOR) + 1)
    return {bytes(piece[:-1].tolist()).decode() for piece in pieces[:-1]}


@pytest.mark.parametrize(
    ("documents", "fraction", "count"), [(2, 0.01, 1), (2, 0.99, 1), (100, 0.02, 2), (731, 0.02, 15)]
)
def test_the_held_out_fraction(documents, fraction, count):
    held = held_out(documents, fraction, seed=0)
    assert len(set(held.tolist())) == len(held) == count
    assert set(held.tolist()) <= set(range(documents))


def test_every_document_is_whole_on_one_side(tmp_path):
    data = section(write_texts(tmp_path / "texts"), sequence_length=2)
    corpus = prepared(data, tmp_path / "cache")
    train, evaluation = documents_in(corpus.train), documents_in(corpus.eval)
    assert len(evaluation) in (7, 8)  # the last one loses a token where the tokens are odd in number
    assert len(train) in (31, 32)
    assert not train & evaluation
    assert train | evaluation <= set(TEXTS)


def test_the_seed_decides_what_is_held_out(tmp_path):
    data = section(write_texts(tmp_path / "texts"), sequence_length=2)
    first, again, other = (documents_in(prepared(data, tmp_path / "cache", seed=seed).eval) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_train_and_eval_need_one_sequence_each(tmp_path):
    data = section(write_texts(tmp_path / "texts", ["abc", "defg"]), sequence_length=6)
    short_train, short_eval = faults(data, tmp_path / "cache")
    assert "train of" in short_train.says
    assert "eval of" in short_eval.says
    assert {fault.says.split("holds ")[1] for fault in (short_train, short_eval)} == {
        "4 tokens, less than one sequence of 6",
        "5 tokens, less than one sequence of 6",
    }


def test_one_document_cannot_be_split(tmp_path):
    [fault] = faults(section(write_texts(tmp_path / "texts", ["long enough", ""])), tmp_path / "cache")
    assert "holds 1 documents with text in them" in fault.says


def test_the_tails_are_dropped_once_and_counted(tmp_path):
    texts = ["x" * 10] * 10  # eleven tokens each, eight documents against two
    corpus = prepared(section(write_texts(tmp_path / "texts", texts)), tmp_path / "cache")
    assert (len(corpus.train), len(corpus.eval)) == (88 // 8, 22 // 8)
    assert corpus.dropped_tokens == 88 % 8 + 22 % 8


def test_each_source_is_a_corpus_of_its_own(tmp_path):
    paths = [str(write_texts(tmp_path / name, [name * 9] * 9)) for name in ("x", "y")]
    data = section(sources=tuple(paths), assignment="by-source")
    first, second = (prepared(data, tmp_path / "cache", source=path) for path in paths)
    assert set(np.unique(first.train)) == {ord("x"), SEPARATOR}
    assert set(np.unique(second.train)) == {ord("y"), SEPARATOR}
    [fault] = faults(data, tmp_path / "cache", source=str(tmp_path / "z"))
    assert (fault.key, fault.says) == ("data.sources", f"{tmp_path / 'z'} does not exist")


def test_texts_of_any_length_give_all_ranks_equally_many_batches(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 300, 100)
    corpus = prepared(section(write_texts(tmp_path / "texts", ["x" * n for n in lengths])), tmp_path / "cache")
    layout = Layout(1, 1, 4)
    options = {"layout": layout, "micro_batch": 2, "accumulation": 1, "assignment": "disjoint", "seed": 0}
    feeds = [Feed(corpus, place=layout.place(rank), isolate_documents=True, **options) for rank in range(4)]
    steps = -(-len(corpus.train) // 8)
    assert {tuple(batch.input_ids.shape) for feed in feeds for _ in range(steps) for batch in feed.next_step()} == {
        (2, 8)
    }
    assert {feed.cursor for feed in feeds} == {8 * steps}
    counts = [
        sum(1 for _ in eval_batches(corpus, sequences=10**9, ranks=4, rank=rank, micro_batch=2, isolate_documents=True))
        for rank in range(4)
    ]
    assert counts == [-(-len(corpus.eval) // 8)] * 4


@pytest.fixture
def tokenised(monkeypatch):
    """A list that grows by one entry whenever something is tokenised."""
    original, calls = corpus_module.tokenise, []

    def counted(source, data, **options):
        calls.append(source.path)
        return original(source, data, **options)

    monkeypatch.setattr(corpus_module, "tokenise", counted)
    return calls


def test_a_second_call_reuses_the_first_ones_work(tokenised, tmp_path):
    data = section(write_texts(tmp_path / "texts"))
    first, second = prepared(data, tmp_path / "cache"), prepared(data, tmp_path / "cache")
    assert len(tokenised) == 1
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train, first.train)


def test_other_sequence_lengths_reuse_the_ids_but_are_other_data(tokenised, tmp_path):
    texts = write_texts(tmp_path / "texts")
    short, long = (prepared(section(texts, sequence_length=length), tmp_path / "cache") for length in (8, 16))
    assert len(tokenised) == 1
    assert long.train.shape[1] == 16
    assert long.fingerprint != short.fingerprint


def test_the_fingerprint_changes_with_the_data(tmp_path):
    texts, cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
    before = prepared(section(texts), cache)
    (texts / "020.txt").write_text(TEXTS[20].replace("t", "T", 1))  # as long as before
    after = prepared(section(texts), cache)
    assert after.fingerprint != before.fingerprint
    assert prepared(section(texts), cache, seed=1).fingerprint != after.fingerprint
    assert prepared(section(texts, eval_fraction=0.5), cache).fingerprint != after.fingerprint


def test_the_fingerprint_is_of_what_is_in_the_files_not_where_or_when(tmp_path):
    here, there = write_texts(tmp_path / "here"), write_texts(tmp_path / "there")
    for path in there.iterdir():
        os.utime(path, (0, 0))
    fingerprints = [prepared(section(path), tmp_path / "cache").fingerprint for path in (here, there)]
    assert fingerprints[0] == fingerprints[1]


def test_another_tokenizer_at_the_same_path_is_noticed(tmp_path):
    texts = write_texts(tmp_path / "texts", ["a b c " * 9] * 9)
    data = section(texts, tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))
    before = prepared(data, tmp_path / "cache", vocab_size=6)
    write_tokenizer(tmp_path / "tokenizer", words={**WORDS, "a": 1, "b": 0})
    assert prepared(data, tmp_path / "cache", vocab_size=6).fingerprint != before.fingerprint


def test_what_fails_leaves_nothing_behind_that_looks_finished(tmp_path):
    texts, cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
    (texts / "039.txt").write_bytes(b"\xff")
    faults(section(texts), cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    write_texts(texts)
    assert prepared(section(texts), cache).documents == 40


def test_an_entry_that_another_node_made_meanwhile_is_as_good(monkeypatch, tmp_path):
    data, cache = section(write_texts(tmp_path / "texts")), tmp_path / "cache"
    expected = prepared(data, cache)
    [entry] = [path for path in cache.iterdir() if path.is_dir()]
    entry.rename(tmp_path / "of another node")
    original = corpus_module.tokenise

    def overtaken(source, data, **options):
        record = original(source, data, **options)
        (tmp_path / "of another node").rename(entry)
        return record

    monkeypatch.setattr(corpus_module, "tokenise", overtaken)
    assert prepared(data, cache).fingerprint == expected.fingerprint
    assert {path.name for path in cache.iterdir()} == {entry.name, f"{entry.name}.lock"}


def test_a_cache_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "cache").write_text("a file")
    [fault] = faults(section(write_texts(tmp_path / "texts")), tmp_path / "cache")
    assert fault.key == str(tmp_path / "cache")


PROCESS = """
import sys, time
from pathlib import Path
from fedshard.core.recipe import DataSection
from fedshard.engine import corpus

original = corpus.tokenise

def slow(source, data, **options):
    time.sleep(0.3)  # so that the others come in the meantime
    return original(source, data, **options)

corpus.tokenise = slow
print("ready", flush=True)
sys.stdin.readline()
data = DataSection(kind="text", path=sys.argv[1], sequence_length=8, eval_fraction=0.2)
print(corpus.prepare(data, vocab_size=257, seed=0, cache=Path(sys.argv[2])).fingerprint)
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_of_processes_that_ask_at_once_one_tokenises(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(write_texts(tmp_path / "texts")), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(corpus_module.__file__).parents[2])}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({fingerprint for fingerprint, _ in outputs}) == 1
    assert sorted(talk for _, talk in outputs) == ["", "", f"tokenising {tmp_path / 'texts'}\n"]
