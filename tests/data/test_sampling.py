import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data.sampling import (
    FEWEST_PER_PART,
    Draw,
    _mix,
    allot,
    bounded,
    counter_hash,
    cut_epoch,
    divide,
    epoch_order,
    split_by_class,
)


def test_the_hash_ends_as_splitmix64():
    # The first outputs of SplitMix64 seeded with 1234567, as published with its reference implementation.
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert _mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_are_distinct_for_every_purpose_seed_and_epoch():
    numbers = [counter_hash(seed, epoch, draw, np.arange(100)) for seed in (0, 1) for epoch in (0, 1) for draw in Draw]
    assert len(np.unique(np.concatenate(numbers))) == len(numbers) * 100


@pytest.mark.parametrize("bound", [1, 2, 9, 1000])
def test_bounded_is_uniform(bound):
    drawn = bounded(counter_hash(0, 0, Draw.ROW, np.arange(200_000)), bound)
    counts = np.bincount(drawn, minlength=bound)
    assert len(counts) == bound
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 200_000 / bound).max() <= 5 * np.sqrt(200_000 / bound)


def test_epoch_order_is_a_permutation_that_seed_and_epoch_change():
    orders = {(seed, epoch): epoch_order(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    for order in orders.values():
        assert np.array_equal(np.sort(order), np.arange(1000))
    assert len({tuple(order) for order in orders.values()}) == 4
    assert np.array_equal(orders[0, 0], epoch_order(1000, 0, 0))


def test_epoch_order_never_changes():
    # A checkpoint resumes in the middle of an epoch: another order would repeat some samples and skip others.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [0, 1, 9, 4, 2, 3, 6, 8, 7, 5]


sizes = st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 400))


@given(sizes)
def test_cut_epoch_covers_every_sample_once_in_order(size):
    parts, more, extra = size
    batch_size, samples = FEWEST_PER_PART * parts + more, FEWEST_PER_PART * parts + extra
    cut = cut_epoch(samples, batch_size, parts)
    assert [position for start, stop in cut for position in range(start, stop)] == list(range(samples))
    for start, stop in cut[:-1]:
        assert stop - start == batch_size
    last = cut[-1][1] - cut[-1][0]
    if last > batch_size:
        assert last - batch_size < FEWEST_PER_PART * parts, "only a tail too short for a step of its own is joined"


@given(sizes)
def test_divide_is_even_and_never_gives_a_single_sample(size):
    parts, more, extra = size
    for start, stop in cut_epoch(FEWEST_PER_PART * parts + extra, FEWEST_PER_PART * parts + more, parts):
        divided = divide(start, stop, parts)
        assert len(divided) == parts
        assert [position for first, last in divided for position in range(first, last)] == list(range(start, stop))
        lengths = [last - first for first, last in divided]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= FEWEST_PER_PART


@given(size=sizes, other=st.integers(1, 12))
def test_steps_are_the_same_for_any_number_of_parts_but_for_a_joined_tail(size, other):
    parts, more, extra = size
    most = max(parts, other)
    samples, batch_size = FEWEST_PER_PART * most + extra, FEWEST_PER_PART * most + more
    one, two = cut_epoch(samples, batch_size, parts), cut_epoch(samples, batch_size, other)
    shorter, longer = sorted((one, two), key=len)
    assert len(longer) - len(shorter) <= 1
    if len(longer) == len(shorter):
        assert longer == shorter
    else:
        assert longer[:-2] == shorter[:-1]
        assert shorter[-1] == (longer[-2][0], longer[-1][1])


def test_split_by_class_is_fixed_and_exact():
    labels = np.repeat([0, 1, 2], [5, 7, 9])
    train, test = split_by_class(labels, [2, 3, 8], seed=1)
    assert np.bincount(labels[train]).tolist() == [2, 3, 8]
    assert sorted([*train, *test]) == list(range(21))
    again, _ = split_by_class(labels, [2, 3, 8], seed=1)
    other, _ = split_by_class(labels, [2, 3, 8], seed=2)
    assert np.array_equal(train, again)
    assert not np.array_equal(train, other)


@given(
    samples=st.integers(8, 400),
    shares=st.lists(st.floats(0, 50), min_size=1, max_size=4).filter(lambda shares: sum(shares) > 0.01),
    least=st.integers(1, 2),
    idle=st.booleans(),
    in_pairs=st.booleans(),
)
def test_shares_are_whole_numbers_of_all_samples(samples, shares, least, idle, in_pairs):
    counts = allot(samples, shares, least, idle=idle, in_pairs=in_pairs)
    assert sum(counts) == samples
    assert all(count >= least or (idle and count == 0) for count in counts)
    ends = np.cumsum(counts)
    assert not in_pairs or all(end % 2 == 0 or end == samples for end in ends)
    small = [share * samples / sum(shares) < 2 * least + 2 for share in shares]
    for count, share in zip(counts, shares, strict=True):
        if not any(small):
            assert abs(count - samples * share / sum(shares)) < (3 if in_pairs else 1)


@pytest.mark.parametrize(
    ("samples", "shares", "least", "options", "counts"),
    [
        (64, [1, 2], 2, {}, [21, 43]),
        (10, [1, 1, 1], 2, {}, [4, 3, 3]),
        (5, [1, 99], 2, {}, [0, 5]),
        (7, [1, 3], 2, {"in_pairs": True}, [2, 5]),
        (20, [1, 30], 4, {"idle": False}, [4, 16]),
        (0, [1, 1], 1, {}, [0, 0]),
    ],
)
def test_shares_of_some_steps(samples, shares, least, options, counts):
    assert allot(samples, shares, least, **options) == counts


@pytest.mark.parametrize(("samples", "parts"), [(7, 1), (7, 3), (20, 2), (20, 7), (64, 3)])
def test_equal_shares_are_equal_parts(samples, parts):
    ends = [0, *np.cumsum(allot(samples, [1.0] * parts, 1)).tolist()]
    assert [*itertools.pairwise(ends)] == divide(0, samples, parts)
