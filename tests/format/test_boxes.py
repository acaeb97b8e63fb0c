import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import FormatError
from adacheck_jax.format.boxes import Box, batches, cuts_of, grid, sizes
from tests.strategies import box_pairs, boxes_in, cuts, elements, numbered, shape_of


@given(cuts())
def test_a_grid_holds_every_element_in_exactly_one_box(cuts):
    shape = shape_of(cuts)
    times = sum((elements(box, shape).astype(int) for box in grid(cuts)), np.zeros(shape, int))
    assert (times == 1).all()
    assert [*sizes(cuts)] == [box.size for box in grid(cuts)]


@given(cuts(), st.randoms())
def test_cuts_are_found_again_from_the_boxes_in_any_order(cuts, random):
    boxes = grid(cuts)
    random.shuffle(boxes)
    assert cuts_of(iter(boxes), shape_of(cuts)) == cuts


def test_scalars_and_empty_axes_have_one_box():
    assert grid(()) == [Box((), ())]
    assert cuts_of([Box((), ())], ()) == ()
    assert cuts_of([Box((0, 0), (0, 3))], (0, 3)) == ((0,), (0, 3))
    assert grid(((0,), (0, 3))) == [Box((0, 0), (0, 3))]


@given(cuts(), st.data())
def test_boxes_are_of_whole_chunks_exactly_if_no_chunk_is_cut(cuts, data):
    shape = shape_of(cuts)
    lengths = tuple(data.draw(st.integers(1, max(n, 1))) for n in shape)
    edges = tuple((*range(0, n, each), n) for n, each in zip(shape, lengths, strict=True))
    box = data.draw(boxes_in(shape))
    is_cut = any(
        (inside := chunk.intersect(box)) is not None and inside != chunk for chunk in grid(edges)
    )
    assert box.is_of_chunks(lengths, shape) == (not is_cut) or not box.size


@given(cuts(), st.data())
def test_boxes_that_are_not_those_of_a_grid_are_an_error(cuts, data):
    shape, boxes = shape_of(cuts), grid(cuts)
    more = [*boxes, data.draw(boxes_in(shape))]
    boxes.remove(data.draw(st.sampled_from(boxes)))
    longer = [Box.full((*shape[:-1], shape[-1] + 1))] if shape else [Box((0,), (1,))]
    for wrong in (boxes, more, longer):
        with pytest.raises(FormatError, match="do not tile"):
            cuts_of(wrong, shape)


def test_an_exact_cover_that_is_no_grid_is_an_error():
    ends = [((0, 0), (1, 2)), ((0, 2), (1, 4)), ((1, 0), (2, 1)), ((1, 1), (2, 4))]
    bricks = [Box(*each) for each in ends]
    with pytest.raises(FormatError, match="do not tile"):
        cuts_of(bricks, (2, 4))


@given(box_pairs())
def test_an_intersection_holds_the_common_elements_and_is_none_without_any(pair):
    shape, a, b = pair
    common = elements(a, shape) & elements(b, shape)
    found = a.intersect(b)
    assert found == b.intersect(a)
    assert (found is None) == (not common.any())
    if found is not None:
        assert (elements(found, shape) == common).all()


@given(box_pairs())
def test_a_box_contains_those_whose_every_element_it_has(pair):
    shape, a, b = pair
    if b.size:
        assert a.contains(b) == elements(a, shape)[b.slices].all()
        assert a.contains(b) == (a.intersect(b) == b)
    assert a.contains(a)
    assert Box.full(shape).contains(b)


def test_a_box_contains_no_box_that_reaches_out_of_it_on_any_side():
    outer = Box((2, 2), (6, 6))
    assert outer.contains(Box((3, 4), (4, 4)))
    for start, stop in [((1, 2), (6, 6)), ((2, 1), (6, 6)), ((2, 2), (7, 6)), ((2, 2), (6, 7))]:
        assert not outer.contains(Box(start, stop))


@given(cuts(), st.data())
def test_a_box_relative_to_another_selects_the_same_elements_inside_it(cuts, data):
    shape = shape_of(cuts)
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.shape)).relative_to([-start for start in outer.start])
    relative = inner.relative_to(outer.start)
    array = numbered(shape)
    assert relative.shape == inner.shape
    assert (array[outer.slices][relative.slices] == array[inner.slices]).all()


@given(st.data())
def test_a_box_from_slices_selects_what_the_slices_select(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 8), max_size=3)))
    bound = st.none() | st.integers(-10, 10)
    index = tuple(slice(data.draw(bound), data.draw(bound)) for _ in shape)
    array = numbered(shape)
    box = Box.from_slices(index, shape)
    assert box.shape == array[index].shape
    assert box.size == array[index].size
    assert (array[box.slices] == array[index]).all()


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_a_batch_is_as_long_as_it_may_be_and_holds_something(sizes_bytes, most_bytes):
    found = [[sizes_bytes[n] for n in batch] for batch in batches(sizes_bytes, most_bytes)]
    assert [each for batch in found for each in batch] == sizes_bytes
    assert all(len(batch) == 1 or (batch and sum(batch) <= most_bytes) for batch in found)
    assert all(sum(a) + b[0] > most_bytes for a, b in itertools.pairwise(found))
