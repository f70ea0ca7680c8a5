"""What ranks feed: the same slots whatever the layout, none twice, none left out, and right targets."""

import itertools

import numpy as np
import pytest
import torch

from fedshard.core.layout import Layout
from fedshard.engine.corpus import Corpus
from fedshard.engine.data import IGNORED, Feed, eval_batches, make_micro_batch
from fedshard.engine.order import Order

LAYOUTS = [
    Layout(groups, replicas, shards)
    for groups, replicas, shards in itertools.product(range(1, 9), repeat=3)
    if groups * replicas * shards <= 8
]
A, B, C, E = 10, 11, 12, 99


def numbered(train, held_out=1, separator=None):
    """A corpus whose sequences are filled with their own numbers."""
    sides = [np.repeat(np.arange(count)[:, None], 4, axis=1) for count in (train, held_out)]
    return Corpus(*sides, separator=separator, documents=0, dropped_tokens=0, fingerprint="")


def feed(corpus, layout, rank, *, micro_batch=1, accumulation=1, assignment="disjoint", seed=0, isolate=False):
    return Feed(
        corpus,
        layout=layout,
        place=layout.place(rank),
        micro_batch=micro_batch,
        accumulation=accumulation,
        assignment=assignment,
        seed=seed,
        isolate_documents=isolate,
    )


def feeds(corpus, layout, **options):
    return [feed(corpus, layout, rank, **options) for rank in range(layout.ranks)]


def numbers(micro_batches):
    """The numbers of the sequences in some micro-batches, in order."""
    return [int(row[0]) for each in micro_batches for row in each.input_ids]


def consumed(all_feeds, steps):
    """The numbers of the sequences that each feed takes in some steps."""
    return [[number for _ in range(steps) for number in numbers(each.next_step())] for each in all_feeds]


def together(per_rank):
    return sorted(itertools.chain.from_iterable(per_rank))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 1), (3, 2)])
def test_what_is_used_up_to_a_step_does_not_depend_on_the_layout(layout, micro_batch, accumulation):
    ranks = feeds(numbered(50), layout, micro_batch=micro_batch, accumulation=accumulation)
    used = together(consumed(ranks, steps=3))
    slots = 3 * layout.ranks * micro_batch * accumulation
    assert used == sorted(Order(50, (0, "order")).sequences(np.arange(slots)))
    assert {each.cursor for each in ranks} == {slots}


def test_a_group_takes_one_stretch_of_slots_whichever_way_its_ranks_stand():
    order = Order(100, (0, "order")).sequences(np.arange(24))
    for inside in [(1, 4), (2, 2), (4, 1)]:
        ranks = feeds(numbered(100), Layout(2, *inside), micro_batch=1, accumulation=3)
        taken = consumed(ranks, steps=1)
        assert together(taken[:4]) == sorted(order[:12])
        assert together(taken[4:]) == sorted(order[12:])
    # Rank 1 of a group of four: its micro-batches are slots 1, 5 and 9 of the group's.
    assert taken[1] == order[[1, 5, 9]].tolist()


def test_a_group_of_other_accumulation_takes_the_same_step():
    by_ranks = consumed(feeds(numbered(100), Layout(1, 1, 4), micro_batch=2), steps=2)
    by_accumulation = consumed(feeds(numbered(100), Layout(1, 1, 1), micro_batch=2, accumulation=4), steps=2)
    assert together(by_ranks) == together(by_accumulation)


@pytest.mark.parametrize("layout", [Layout(1, 1, 1), Layout(3, 1, 1), Layout(2, 2, 2)], ids=str)
def test_another_layout_goes_on_where_the_last_one_stopped(layout):
    before = feeds(numbered(40), Layout(2, 1, 2), micro_batch=2)
    used = together(consumed(before, steps=3))
    after = feeds(numbered(40), layout)
    for each in after:
        each.cursor = before[0].cursor
    used += together(consumed(after, steps=2))
    expected = Order(40, (0, "order")).sequences(np.arange(24 + 2 * layout.ranks))
    assert sorted(used) == sorted(expected)


def test_resume_after_accumulated_steps_starts_at_the_next_micro_batch():
    straight = feed(numbered(100), Layout(1, 1, 1), 0, accumulation=4)
    thirteenth = [number for _ in range(4) for number in numbers(straight.next_step())][12]
    stopped = feed(numbered(100), Layout(1, 1, 1), 0, accumulation=4)
    consumed([stopped], steps=3)
    resumed = feed(numbered(100), Layout(1, 1, 1), 0, accumulation=4)
    resumed.cursor = stopped.cursor
    assert resumed.cursor == 12
    assert numbers(resumed.next_step())[0] == thirteenth


@pytest.mark.parametrize("stop", range(13))
def test_resume_at_any_step_neither_repeats_nor_skips(stop):
    straight = consumed(feeds(numbered(12), Layout(1, 1, 1)), steps=12)[0]
    stopped, resumed = (feed(numbered(12), Layout(1, 1, 1), 0) for _ in range(2))
    first = consumed([stopped], steps=stop)[0]
    resumed.cursor = stopped.cursor
    assert first + consumed([resumed], steps=12 - stop)[0] == straight
    assert sorted(straight) == list(range(12))


def test_an_epoch_after_a_resume_near_the_end_of_one_is_whole():
    stopped, resumed = (feed(numbered(10), Layout(1, 1, 1), 0) for _ in range(2))
    consumed([stopped], steps=9)
    resumed.cursor = stopped.cursor
    [rest] = consumed([resumed], steps=21)
    assert sorted(rest[1:11]) == sorted(rest[11:21]) == list(range(10))


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(2, 1, 1)], ids=str)
def test_three_sequences_on_two_ranks_are_complete_and_disjoint(layout):
    taken = consumed(feeds(numbered(3), layout), steps=3)
    assert [len(each) for each in taken] == [3, 3]
    assert together(taken) == [0, 0, 1, 1, 2, 2]  # two epochs over both ranks


def test_the_last_step_of_an_epoch_runs_on_into_the_next_one():
    taken = consumed(feeds(numbered(21), Layout(1, 1, 2)), steps=11)
    assert [len(each) for each in taken] == [11, 11]
    used = together(taken)
    assert set(used) == set(range(21))
    assert len(used) == 22


def test_the_last_accumulation_of_an_epoch_is_full():
    alone = feed(numbered(10), Layout(1, 1, 1), 0, accumulation=4)
    steps = [alone.next_step() for _ in range(3)]
    assert [len(step) for step in steps] == [4, 4, 4]
    assert {batch.label_tokens for step in steps for batch in step} == {3}


def test_a_step_may_be_larger_than_the_whole_corpus():
    [taken] = consumed(feeds(numbered(3), Layout(1, 1, 1), micro_batch=9), steps=1)
    assert sorted(taken) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_replicated_gives_every_group_all_in_an_order_of_its_own():
    ranks = feeds(numbered(24), Layout(2, 1, 2), micro_batch=2, assignment="replicated")
    taken = consumed(ranks, steps=6)
    assert together(taken[:2]) == together(taken[2:]) == list(range(24))
    assert taken[0] != taken[2]
    assert {each.cursor for each in ranks} == {24}


def test_by_source_reads_each_groups_corpus_by_a_cursor_of_its_own():
    layout = Layout(2, 1, 2)
    ranks = [feed(numbered(size), layout, rank, assignment="by-source") for rank, size in enumerate([8, 8, 6, 6])]
    taken = consumed(ranks, steps=4)
    assert together(taken[:2]) == list(range(8))
    assert set(together(taken[2:])) == set(range(6))
    assert {each.cursor for each in ranks} == {8}


def test_the_seed_decides_the_order():
    [first], [again], [other] = (
        consumed(feeds(numbered(30), Layout(1, 1, 1), seed=seed), steps=30) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_labels_are_the_next_tokens():
    batch = make_micro_batch(np.array([[A, B, E, C], [C, B, A, E]], dtype=np.uint16), separator=None)
    assert batch.input_ids.tolist() == [[A, B, E, C], [C, B, A, E]]
    assert batch.labels.tolist() == [[B, E, C, IGNORED], [B, A, E, IGNORED]]
    assert batch.label_tokens == 6
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.document_ids is None
    assert batch.position_ids is None


def test_isolated_documents_have_ids_positions_and_no_label_across():
    batch = make_micro_batch(np.array([[A, B, E, C, E, A], [E, E, B, B, C, E]]), separator=E)
    assert batch.document_ids is not None
    assert batch.position_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [
        [B, E, IGNORED, E, IGNORED, IGNORED],
        [IGNORED, IGNORED, B, C, E, IGNORED],
    ]
    assert batch.label_tokens == 3 + 3
    assert batch.document_ids.dtype == batch.position_ids.dtype == torch.int64


def test_a_document_has_the_same_positions_and_labels_behind_any_other():
    one, other = (
        make_micro_batch(np.array([[*first, E, C, B, A, E]]), separator=E) for first in ([A, A, A], [B, C, A])
    )
    assert one.position_ids is not None
    assert other.position_ids is not None
    assert one.position_ids[0, 4:].tolist() == other.position_ids[0, 4:].tolist() == [0, 1, 2, 3]
    assert one.labels[0, 3:].tolist() == other.labels[0, 3:].tolist() == [IGNORED, B, A, E, IGNORED]


@pytest.mark.parametrize("isolated", [True, False])
def test_every_separator_is_a_target_once_per_document(isolated):
    batch = make_micro_batch(np.array([[A, E, B, B, E, C, E, A]]), separator=E if isolated else None)
    assert int((batch.labels == E).sum()) == 3


def test_the_feed_isolates_with_the_corpus_separator():
    corpus = numbered(4, separator=0)  # the sequence 0 0 0 0: four documents of a separator alone
    [batch] = feed(corpus, Layout(1, 1, 1), 0, micro_batch=4, isolate=True).next_step()
    assert batch.label_tokens == 9  # one of four rows, its labels masked
    [batch] = feed(corpus, Layout(1, 1, 1), 0, micro_batch=4, isolate=False).next_step()
    assert batch.label_tokens == 12


def test_a_micro_batch_moves_whole():
    batch = make_micro_batch(np.array([[A, E, B]]), separator=E).to(torch.device("meta"))
    assert batch.document_ids is not None
    assert batch.position_ids is not None
    tensors = [batch.input_ids, batch.labels, batch.document_ids, batch.position_ids]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.label_tokens == 1
    assert make_micro_batch(np.array([[A]]), separator=None).to(torch.device("meta")).document_ids is None


def evaluated(held_out, sequences, ranks, micro_batch):
    """Per rank: its batches, and the numbers of the sequences in them that have labels."""
    corpus = numbered(1, held_out)
    batches = [
        list(
            eval_batches(
                corpus,
                sequences=sequences,
                ranks=ranks,
                rank=rank,
                micro_batch=micro_batch,
                isolate_documents=False,
            )
        )
        for rank in range(ranks)
    ]
    labelled = [
        [
            int(ids[0])
            for each in of_rank
            for ids, labels in zip(each.input_ids, each.labels, strict=True)
            if labels[0] >= 0
        ]
        for of_rank in batches
    ]
    return batches, labelled


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 7])
@pytest.mark.parametrize("held_out", [1, 5, 6, 23])
def test_every_held_out_sequence_comes_once_and_every_rank_has_as_many_batches(ranks, micro_batch, held_out):
    batches, labelled = evaluated(held_out, 1000, ranks, micro_batch)
    assert together(labelled) == list(range(held_out))
    assert {len(of_rank) for of_rank in batches} == {-(-held_out // (ranks * micro_batch))}
    assert {tuple(each.input_ids.shape) for of_rank in batches for each in of_rank} == {(micro_batch, 4)}
    assert sum(each.label_tokens for of_rank in batches for each in of_rank) == 3 * held_out


def test_five_blocks_on_four_ranks_fill_up_with_rows_without_labels():
    batches, labelled = evaluated(held_out=5, sequences=1000, ranks=4, micro_batch=1)
    assert labelled == [[0, 4], [1], [2], [3]]
    assert [[each.label_tokens for each in of_rank] for of_rank in batches] == [[3, 3], [3, 0], [3, 0], [3, 0]]


def test_every_evaluation_uses_the_same_first_sequences():
    assert [evaluated(6, 2, 1, 1)[1] for _ in range(3)] == [[[0, 1]]] * 3
    assert together(evaluated(6, 2, 2, 4)[1]) == [0, 1]
    assert together(evaluated(6, 6, 2, 1)[1]) == list(range(6))
