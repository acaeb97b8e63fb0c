"""The place of each box in its writer's pack."""

import dataclasses

import pytest

from adacheck_jax.format import pack_plan
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.manifest import Leaf

A_BOX = Leaf("a", (4,), "float32", 4, None, ((0, 4),), (0,))


def box_of(length, width):
    cuts = ((0, length),)
    return dataclasses.replace(A_BOX, shape=(length,), cuts=cuts, itemsize_bytes=width)


KIND = "an alias of another kind"
CODED = [[(3, 2), (2, 3)]]


@pytest.mark.parametrize(
    ("leaf", "encodings", "alias", "sizes", "told"),
    [
        (box_of(3, 4), "rr", (1, 0), [[]], KIND),
        (A_BOX, "rp", (1, 0), [[]], KIND),
        (A_BOX, "ep", (1, 0), [[]], KIND),
        (A_BOX, "xs", (1, 0), [[]], KIND),
        (box_of(8, 2), "pp", (1, 0), [[]], KIND),
        (box_of(8, 2), "ee", (1, 0), [[]], KIND),
        (A_BOX, "cc", (1, 0), CODED, KIND),
        *(
            (A_BOX, "rr", pair, [[]], None)
            for pair in [(2, 0), (5, 1), (0, 0), (0, 1), (1, 1), (1, 2)]
        ),
        *((A_BOX, "cr", None, [each], "code") for each in ([], [(0, 0)], [(80, 1)])),
        *((A_BOX, "cr", None, [each], "code") for each in ([(1, 0)] * 2, [(2**60, 2**60)])),
    ],
)
def test_aliases_and_sizes_that_no_writer_tells_are_an_error(leaf, encodings, alias, sizes, told):
    aliases = [() if alias is None else (alias,)]
    is_later = alias is not None and alias[1] >= alias[0]
    with pytest.raises((ValueError, IndexError) if is_later else ValueError, match=told):
        pack_plan.plan_delta([A_BOX, leaf], [0, 1], [encodings], aliases, sizes)


def test_codes_lie_after_all_others_at_the_sizes_that_are_told():
    leaves = [dataclasses.replace(A_BOX, path=path) for path in "abcd"]
    plan = pack_plan.plan_delta(leaves, [0, 1, 2, 3], ["crcp"], [()], [[(3, 2), (5, 0)]])
    starts = [(x.raw_start, x.raw_bytes, x.compressed_start) for x in plan.extents]
    assert starts == [(16, 3, 16), (0, 16, 0), (19, 5, 18), (16, 0, 0)]
    assert (plan.raw_bytes, plan.compressed_bytes) == ((24,), (18,))


def test_a_delta_in_which_nothing_changed_takes_no_bytes():
    leaf = Leaf("a", (4,), "float32", 4, None, ((0, 2, 4),), (0, 1))
    plan = pack_plan.plan_delta([leaf], [0], [Encoding.SAME, Encoding.SAME], [(), ()])
    assert plan == pack_plan.WritePlan((), (0, 0), (0, 0))
