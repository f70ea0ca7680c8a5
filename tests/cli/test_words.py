"""Words of a command: which are its own, which are the recipe's, and which are neither."""

import pytest

from fedshard.cli.words import Words, read_words
from fedshard.core.errors import InputError

FLAGS = {"--into": "DIR", "--dry-run": "", "--json": ""}


def refusals(*words: str) -> list[str]:
    with pytest.raises(InputError) as refused:
        read_words(words, FLAGS)
    return [str(fault) for fault in refused.value.faults]


def test_words_are_sorted_out():
    words = ["--json", "r.toml", "--sync.every", "3", "--into=x", "--seed=-1", "--log.wandb="]
    assert read_words(words, FLAGS) == Words(
        ["r.toml"], {"--json": "", "--into": "x"}, ["--sync.every", "3", "--seed", "-1", "--log.wandb", ""]
    )


def test_a_value_may_hold_what_separates_names_from_values():
    assert read_words(["--into", "a=b", "--data.path=c=d", "e=f.toml"], FLAGS) == Words(
        ["e=f.toml"], {"--into": "a=b"}, ["--data.path", "c=d"]
    )


def test_a_negative_number_is_a_value():
    assert read_words(["--seed", "-1"], FLAGS).overrides == ["--seed", "-1"]


def test_the_last_of_equal_flags_wins():
    assert read_words(["--into", "a", "--into", "b"], FLAGS).flags == {"--into": "b"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--into"], "--into: has no value. Write --into DIR."),
        (["--into", "--json"], "--into: has no value. Write --into DIR."),
        (["--into="], "--into: has no value. Write --into DIR."),
        (["--into", ""], "--into: has no value. Write --into DIR."),
        (["--json=false"], "--json: takes no value, 'false' given. Write --json alone."),
        (["--dry-run="], "--dry-run: takes no value, '' given. Write --dry-run alone."),
        (["--sync.every"], "--sync.every: has no value. Write --sync.every VALUE."),
        (["--sync.every", "--json"], "--sync.every: has no value. Write --sync.every VALUE."),
        (["--sync.evry"], "--sync.evry: has no value, and is no flag. Did you mean --sync.every VALUE?"),
        (["--dryrun"], "--dryrun: no such option. Did you mean --dry-run?"),
        (["--dry_run"], "--dry_run: no such option. Did you mean --dry-run?"),
        (["--int", "x"], "--int: no such option. Did you mean --into?"),
        (["-x"], "-x: no such option. Options begin with two dashes, and have a name."),
        (["-"], "-: no such option. Options begin with two dashes, and have a name."),
        (["--", "x"], "--: no such option. Options begin with two dashes, and have a name."),
        (["a", "b"], "b: one path too many. Options begin with two dashes."),
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_named_with_its_mend(words, said):
    assert refusals(*words) == [said]


def test_all_wrong_words_are_told_at_once():
    keys = [said.partition(":")[0] for said in refusals("a", "b", "--jsn", "--dry-run=1", "c", "--into")]
    assert keys == ["--jsn", "--dry-run", "--into", "b", "c"]


@pytest.mark.parametrize("word", ["--seed", "--layout", "--model", "--data", "--train", "--sync", "--budget", "--log"])
def test_no_section_of_the_recipe_is_taken_for_a_misspelt_flag(word):
    assert read_words([word, "x"], FLAGS).overrides == [word, "x"]
