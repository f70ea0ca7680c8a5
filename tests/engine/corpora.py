"""Small corpora and tokenizers for the tests of training data."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fedshard.core.errors import InputError
from fedshard.core.recipe import DataSection
from fedshard.engine.corpus import prepare

BYTES = 257
SEPARATOR = 256
WORDS = {"a": 0, "b": 1, "c": 2, "?": 3, "<s>": 4, "</s>": 5}
TEXTS = [f"text {number}: " + "word " * (3 * number % 17) for number in range(40)]


def write_texts(folder, texts=TEXTS):
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def write_tokenizer(folder, template="$A", eos="</s>", words=WORDS):
    """A tokenizer of words that adds by itself what `template` says, truncates and pads."""
    tokenizer = Tokenizer(models.WordLevel({w: i for w, i in words.items() if not w.endswith("s>")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    added = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=added)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return folder


def section(path=None, kind="text", **fields):
    fields = {"sequence_length": 8, "eval_fraction": 0.2, **fields}
    return DataSection(kind=kind, path=None if path is None else str(path), **fields)


def prepared(data, cache, vocab_size=BYTES, seed=0, source=None):
    return prepare(data, vocab_size=vocab_size, seed=seed, cache=cache, source=source, quiet=True)


def faults(data, cache, vocab_size=BYTES, source=None):
    with pytest.raises(InputError) as refused:
        prepared(data, cache, vocab_size, source=source)
    return refused.value.faults
