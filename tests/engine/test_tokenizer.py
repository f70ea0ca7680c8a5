"""Text to ids: exactly one separator after each document, and no id beyond the vocabulary."""

import numpy as np
import pytest
from corpora import BYTES, faults, prepared, section, write_texts, write_tokenizer

from fedshard.core.errors import InputError
from fedshard.engine.draft import draft_documents
from fedshard.engine.sources import find_source


def drafted(path, tokenizer, tmp_path, vocab_size=6):
    """The ids of all documents, in their order."""
    data = section(path, tokenizer=str(tokenizer))
    draft = draft_documents(find_source(data, None), data, vocab_size, tmp_path / "draft", lambda documents: None)
    return draft.stream().tolist()


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_exactly_one_separator_after_each_document_whatever_the_tokenizer_adds(template, tmp_path):
    texts = write_texts(tmp_path / "texts", ["a", "b"])
    assert drafted(texts, write_tokenizer(tmp_path / "tokenizer", template), tmp_path) == [0, 5, 1, 5]


def test_documents_are_encoded_whole_though_the_tokenizer_truncates_and_pads(tmp_path):
    texts = write_texts(tmp_path / "texts", ["a b c a b c", "c"])
    assert drafted(texts, write_tokenizer(tmp_path / "tokenizer"), tmp_path) == [0, 1, 2, 0, 1, 2, 5, 2, 5]


def test_text_that_looks_like_a_separator_is_none(tmp_path):
    texts = write_texts(tmp_path / "texts", ["a </s> b"])
    assert drafted(texts, write_tokenizer(tmp_path / "tokenizer"), tmp_path).count(5) == 1


def test_documents_without_any_id_leave_no_separator_behind(tmp_path):
    texts = write_texts(tmp_path / "texts", ["a", "", "  ", "b"])
    assert drafted(texts, write_tokenizer(tmp_path / "tokenizer"), tmp_path) == [0, 5, 1, 5]


def test_bytes_are_utf8_and_newlines_stay_what_they_are(tmp_path):
    texts = write_texts(tmp_path / "texts", ["é"])
    (texts / "001.txt").write_bytes(b"\r\n")
    assert drafted(texts, "bytes", tmp_path, BYTES) == [0xC3, 0xA9, 256, 13, 10, 256]


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_the_separator_is_the_end_of_text_token_however_it_is_written(eos, tmp_path):
    texts = write_texts(tmp_path / "texts", ["a " * 10] * 10)
    data = section(texts, tokenizer=str(write_tokenizer(tmp_path / "tokenizer", eos=eos)))
    assert prepared(data, tmp_path / "cache", vocab_size=6).separator == 5


def test_the_end_of_text_token_may_stand_in_the_special_tokens_map(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", eos=None)
    (tokenizer / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    texts = write_texts(tmp_path / "texts", ["a " * 10] * 10)
    assert prepared(section(texts, tokenizer=str(tokenizer)), tmp_path / "cache", vocab_size=6).separator == 5


@pytest.mark.parametrize(
    ("eos", "says"), [(None, "no end-of-text token"), ("<end>", "'<end>' .* is not in its vocabulary")]
)
def test_a_tokenizer_without_a_separator_is_refused(eos, says, tmp_path):
    texts = write_texts(tmp_path / "texts", ["a"] * 9)
    data = section(texts, tokenizer=str(write_tokenizer(tmp_path / "tokenizer", eos=eos)))
    with pytest.raises(InputError, match=says):
        prepared(data, tmp_path / "cache", vocab_size=6)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    data = section(write_texts(tmp_path / "texts"), tokenizer=str(tmp_path))
    [fault] = faults(data, tmp_path / "cache")
    assert (fault.key, fault.says) == ("data.tokenizer", f"{tmp_path} holds no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be read" in faults(data, tmp_path / "cache")[0].says


def test_a_tokenizer_beyond_the_vocabulary_is_refused_with_both_numbers(tmp_path):
    words = {**{str(number): number for number in range(126)}, "?": 126}  # and two special tokens: 129 ids
    tokenizer = write_tokenizer(tmp_path / "tokenizer", words=words)
    data = section(write_texts(tmp_path / "texts", ["1 " * 9] * 9), tokenizer=str(tokenizer))
    [fault] = faults(data, tmp_path / "cache", vocab_size=128)
    assert fault.key == "data.tokenizer"
    assert "up to 128, and the model's vocabulary of 128 ends at 127" in fault.says
    assert "at least 129" in fault.mend
    assert prepared(data, tmp_path / "cache", vocab_size=129).train.size
    assert faults(data, tmp_path / "cache", vocab_size=128) == (fault,)  # from the cache too


def test_an_array_with_one_id_too_large_is_refused_with_both_numbers(tmp_path):
    ids = np.zeros((9, 8), dtype=np.int64)
    ids[4, 4] = 128
    np.save(tmp_path / "ids.npy", ids)
    data = section(tmp_path / "ids.npy", "tokens")
    [fault] = faults(data, tmp_path / "cache", vocab_size=128)
    assert (fault.key, "up to 128" in fault.says, "of 128" in fault.says) == ("data.path", True, True)
    assert prepared(data, tmp_path / "cache", vocab_size=129).documents == 9


@pytest.mark.parametrize(("highest", "dtype"), [(65535, np.uint16), (65536, np.uint32)])
def test_ids_are_stored_in_what_they_need(highest, dtype, tmp_path):
    ids = np.full((4, 8), highest, dtype=np.int64)
    np.save(tmp_path / "ids.npy", ids)
    corpus = prepared(section(tmp_path / "ids.npy", "tokens"), tmp_path / "cache", vocab_size=10**6)
    assert corpus.train.dtype == dtype
    assert corpus.train.max() == highest
