"""Every tensor travels exactly once, in the order agreed, in memory that is shared and not copied twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybridpar.sync.buckets import cut_buckets, layout_fingerprint, make_buckets

sizes = st.lists(st.integers(0, 300), max_size=40)
limits = st.integers(1, 400)


@settings(deadline=None)
@given(sizes, limits)
def test_each_tensor_is_in_one_bucket_that_is_closed_as_soon_as_it_is_full(sizes, limit):
    cut = cut_buckets(sizes, limit)
    assert sorted(index for bucket in cut for index in bucket) == list(range(len(sizes)))
    assert all(cut)
    assert all(bucket == sorted(bucket) for bucket in cut)
    assert [bucket[-1] for bucket in cut] == sorted(bucket[-1] for bucket in cut), "they leave by their last one"
    for bucket in cut:
        filled = sum(sizes[index] for index in bucket)
        if len(bucket) > 1:
            assert all(sizes[index] < limit for index in bucket), "a large tensor travels alone"
            assert filled - sizes[bucket[-1]] < limit, "it was full before its last tensor"
    open_ended = [bucket for bucket in cut if sum(sizes[index] for index in bucket) < limit]
    assert len(open_ended) <= 1, "only the last of the small ones may leave half empty"


def parameters(*shapes, dtype=torch.float32):
    return [(f"p{index}", nn.Parameter(torch.randn(shape).to(dtype))) for index, shape in enumerate(shapes)]


def channels_last(shape):
    return nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))


def strided(shape):
    """A parameter with gaps in its memory."""
    return nn.Parameter(torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2])


def collect(bucket, gradients):
    for slot in bucket.slots:
        slot.parameter.grad = gradients[slot.name]
    return bucket.collect()


@pytest.mark.parametrize("limit", [1, 100_000])
def test_memory_formats_are_kept(limit):
    order = [("conv", channels_last((4, 3, 2, 2))), ("gaps", strided((3, 4))), ("plain", nn.Parameter(torch.ones(3)))]
    # What autograd hands over: strided like the parameter where that has no gaps, else contiguous.
    gradients = {name: torch.randn_like(parameter) for name, parameter in order}
    expected = {name: -gradient for name, gradient in gradients.items()}
    for bucket in make_buckets(order, limit):
        collect(bucket, gradients).neg_()
    for name, parameter in order:
        assert torch.equal(parameter.grad, expected[name]), name
    conv = order[0][1]
    assert conv.grad.stride() == conv.stride()


def test_the_fingerprint_is_of_names_shapes_memory_formats_and_order():
    first = layout_fingerprint(make_buckets(parameters((3,), (4,)), 8))
    assert first == layout_fingerprint(make_buckets(parameters((3,), (4,)), 8))
    assert first != layout_fingerprint(make_buckets(parameters((4,), (3,)), 8))
    assert first != layout_fingerprint(make_buckets(list(reversed(parameters((3,), (4,)))), 8))
    assert first != layout_fingerprint(make_buckets([("q", parameters((3,))[0][1]), *parameters((1,), (4,))[1:]], 8))
    assert 0 <= first < 1 << 16
    one, other = nn.Parameter(torch.ones(4, 3, 2, 2)), channels_last((4, 3, 2, 2))
    assert layout_fingerprint(make_buckets([("w", one)], 8)) != layout_fingerprint(make_buckets([("w", other)], 8))
