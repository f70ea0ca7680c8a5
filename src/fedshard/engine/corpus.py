"""Documents in, packed sequences of token ids out: tokenised once per machine, cached and memory-mapped.

document   document        sequences of 4
a b c E  + d e E        →  [a b c E] [d e E …]
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import DataSection
from fedshard.engine.draft import check_vocabulary
from fedshard.engine.sources import Source, find_source
from fedshard.engine.tokenise import EVAL, TRAIN, Record, tokenise
from fedshard.engine.tokenizer import tokenizer_digest

FORMAT = 1  # raise it when the same input would be tokenised or dealt in another way
RECORD = "record.json"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Packed sequences to train on and to evaluate on. No document has parts in both."""

    train: np.ndarray  # (train_sequences, sequence_length)
    """Token ids, memory-mapped."""
    eval: np.ndarray  # (eval_sequences, sequence_length)
    """Token ids of the held-out documents, memory-mapped; the first ones are a fair sample of all."""
    separator: int | None
    """The id that ends each document; None for arrays of tokens whose tokenizer is not known."""
    documents: int
    """Documents in train and eval together; for arrays of tokens, their sequences."""
    dropped_tokens: int
    """Tokens at the ends of the data that do not fill a sequence: less than one sequence of train, one of eval."""
    fingerprint: str
    """A hash of all sequences, as hex; the same wherever the data lie and whenever they were written."""


def prepare(
    data: DataSection, *, vocab_size: int, seed: int, cache: Path, source: str | None = None, quiet: bool = False
) -> Corpus:
    """The corpus that `data` describes, tokenised if `cache` does not hold it yet.

    Of many processes that ask at once, one tokenises (with a line on stderr unless `quiet`), the others wait for it.
    `seed` decides which documents are held out; `source` is one of `data.sources`, for the group that trains on it.

    Raises InputError where data or tokenizer are missing or unreadable, ids reach beyond `vocab_size`, train or eval
    do not fill one sequence, documents are to be isolated and nothing says where they end, or the cache is unusable.
    """
    found = find_source(data, source)
    name = f"{data.kind}-{_cache_key(found, data, seed)}"
    if not (cache / name).exists():
        with _alone(cache, name):
            if not (cache / name).exists():  # it may have come while this process waited
                _add_to_cache(cache / name, found, data, seed, vocab_size, quiet)
    record = Record(**json.loads((cache / name / RECORD).read_text()))
    check_vocabulary(found, data, record.highest_id, vocab_size)
    return _open(cache / name, record, found, data)


def _cache_key(source: Source, data: DataSection, seed: int) -> str:
    """A hash of everything that decides the ids. Files count by path, size and time, so that nothing is read."""
    stats = [(str(path.absolute()), path.stat()) for path in source.files]
    parts = {
        "format": FORMAT,
        "files": [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        "text_field": data.text_field,
        "tokenizer": tokenizer_digest(data.tokenizer),
        # Documents are dealt before they are cut into sequences; arrays of tokens are cut first.
        "sequence_length": data.sequence_length if data.kind == "tokens" else None,
        "eval_fraction": data.eval_fraction,
        "seed": seed,
    }
    return _hash(parts)


@contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock of one entry of the cache; the system lets go of it even if this process is killed."""
    with ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((cache / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            mend = "Give a folder that can be written to, on a file system with locks."
            raise InputError([Fault(str(cache), f"cannot be used as a cache ({error})", mend)]) from None
        yield


def _add_to_cache(entry: Path, source: Source, data: DataSection, seed: int, vocab_size: int, quiet: bool) -> None:
    """Tokenise beside the entry and rename at the end, so that an entry that exists is complete."""
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=f"unfinished-{entry.name}-") as scratch:
        built = Path(scratch) / entry.name
        built.mkdir()
        record = tokenise(source, data, seed=seed, vocab_size=vocab_size, into=built, quiet=quiet)
        (built / RECORD).write_text(json.dumps(asdict(record)))
        try:
            built.rename(entry)
        except OSError:
            # Locks of a shared file system may hold on one node only; another node's entry is as good as ours.
            if not entry.exists():
                raise


def _open(entry: Path, record: Record, source: Source, data: DataSection) -> Corpus:
    """Cut the streams of a cache entry into sequences."""
    streams = [np.load(entry / name, mmap_mode="r") for name in (TRAIN, EVAL)]
    faults = [
        Fault(
            "data.eval_fraction",
            f"{side} of {source.path} holds {len(stream)} tokens, less than one sequence of {data.sequence_length}",
            "Give more data, shorter sequences or another fraction.",
        )
        for side, stream in zip(("train", "eval"), streams, strict=True)
        if len(stream) < data.sequence_length
    ]
    if data.isolate_documents and record.separator is None:
        says = f"{source.path} does not say where documents end"
        faults.append(Fault("data.isolate_documents", says, "Give the arrays' own data.tokenizer."))
    if faults:
        raise InputError(faults)
    train, evaluation = (_sequences(stream, data.sequence_length) for stream in streams)
    left_over = sum(len(stream) for stream in streams) - train.size - evaluation.size
    return Corpus(
        train,
        evaluation,
        record.separator,
        record.documents,
        record.dropped_tokens + left_over,
        _hash([FORMAT, record.digest, record.separator, data.sequence_length]),
    )


def _sequences(stream: np.ndarray, length: int) -> np.ndarray:
    """A view of the stream as whole sequences. (sequences, length)"""
    count = len(stream) // length
    return np.asarray(stream)[: count * length].reshape(count, length)


def _hash(parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
