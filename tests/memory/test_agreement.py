"""Agreement at a restart: the newest step that all files hold together, or why storage serves."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.device.ownership import share_out
from adacheck_jax.device.sharding import Layout
from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.memory import agreement, holdings, peers
from adacheck_jax.memory.agreement import Choice, Offer, OfferedStep
from adacheck_jax.memory.holdings import Held, digests_of

SHAPES = ((8, 6), (5,), (), (4, 4))
SIZES = [math.prod(shape) for shape in SHAPES]


def own_sums(step: int, process: int) -> tuple[int, ...]:
    """What a process contributes to the fingerprints of a step."""
    return tuple(hash((step, process, leaf)) % 2**64 for leaf in range(len(SHAPES)))


def sums_of(step: int, count: int) -> tuple[int, ...]:
    columns = zip(*(own_sums(step, process) for process in range(count)), strict=True)
    return tuple(map(combine, columns))


@st.composite
def runs(draw: st.DrawFn, run: str = "run") -> list[Offer]:
    """What all processes of a run hold: each has passed the gate of a step, or comes to it."""
    count = draw(st.integers(1, 5))
    own = [dict[int, tuple[Box, ...]]() for _ in range(count)]
    copies = [dict[int, dict[int, tuple[Box, ...]]]() for _ in range(count)]
    for i, shape in enumerate(SHAPES):
        cuts = tuple((0, *draw(st.sets(st.integers(1, n - 1), max_size=2)), n) for n in shape)
        for box in grid(tuple(tuple(sorted(each)) for each in cuts)):
            owner, second = draw(st.tuples(*[st.integers(0, count - 1)] * 2))
            own[owner][i] = (*own[owner].get(i, ()), box)
            if second != owner and draw(st.booleans()):
                of_owner = copies[second].setdefault(owner, {})
                of_owner[i] = (*of_owner.get(i, ()), box)
    gate, offers = draw(st.integers(3, 20)), list[Offer]()
    all_stored = draw(st.booleans())
    for process in range(count):
        told = {
            "at": OfferedStep(gate, sums_of(gate, count), own_sums(gate, process)),
            "next": OfferedStep(gate + 1, None, own_sums(gate + 1, process)),
            "through": OfferedStep(gate + 1, sums_of(gate + 1, count), own_sums(gate + 1, process)),
        }
        ways = [("next", "at"), ("through",)] if all_stored else [("at",), ("next", "at")]
        steps = tuple(told[each] for each in draw(st.sampled_from(ways)))
        offers.append(Offer(run, process, count, Held(own[process], copies[process]), steps))
    return offers


def covers(offers: list[Offer], step: int) -> bool:
    """True if the files hold all elements of a step."""
    for i, size in enumerate(SIZES):
        boxes = {
            box
            for offer in offers
            for each in offer.steps
            if each.step == step
            for leaf, box in offer.boxes(each)
            if leaf == i
        }
        if sum(box.size for box in boxes) != size:
            return False
    return True


@given(runs(), st.data())
def test_the_newest_step_that_is_whole_and_known_is_chosen(offers, data):
    count = len(offers)
    left = data.draw(st.permutations(offers))[: data.draw(st.integers(0, count))]
    stored = data.draw(st.none() | st.integers(0, 25))
    found = agreement.choose(left, SIZES, stored)
    known = {
        each.step
        for offer in left
        for each in offer.steps
        if covers(left, each.step)
        and (
            any(x.sums for o in left for x in o.steps if x.step == each.step)
            or sum(x.step == each.step for o in left for x in o.steps) == count
        )
    }
    newest = max(known, default=None)
    if newest is None or (stored is not None and stored > newest):
        assert isinstance(found, str)
    else:
        assert found == Choice("run", newest, sums_of(newest, count))


@given(runs())
def test_with_all_files_no_step_that_all_have_stored_is_lost(offers):
    found = agreement.choose(offers, SIZES, None)
    assert isinstance(found, Choice)
    assert found.step == min(max(each.step for each in offer.steps) for offer in offers)


@given(runs("old"), runs("new"), st.data())
def test_a_state_is_of_one_run_alone(old, new, data):
    left = data.draw(st.permutations([*old, *new]))[: data.draw(st.integers(0, 10))]
    found = agreement.choose(left, SIZES, None)
    if isinstance(found, Choice):
        assert agreement.choose([x for x in left if x.run == found.run], SIZES, None) == found


@given(runs())
def test_an_offer_is_read_as_it_was_told(offers):
    for offer in offers:
        found = Offer.of_json(offer.to_json())
        assert [found.boxes(each) for each in found.steps] == [
            offer.boxes(each) for each in offer.steps
        ]
        assert (found.run, found.process, found.steps) == (offer.run, offer.process, offer.steps)


@given(runs(), st.data())
def test_each_box_is_given_by_one_that_has_it(offers, data):
    at = data.draw(st.permutations(range(len(offers))))  # files lie with other processes now
    held = {process: offers[n].boxes(offers[n].steps[0]) for n, process in enumerate(at)}
    found = agreement.givers(held)
    for i, size in enumerate(SIZES):
        assert sum(box.size for leaf, box in found if leaf == i) == size
    for (i, box), giver in found.items():
        assert (i, box) in held[giver]


def test_a_bad_copy_is_not_offered():
    box = Box((0,), (5,))
    held = Held({}, {1: {1: (box,)}, 2: {2: (Box((), ()),)}})
    offer = Offer("run", 0, 3, held, (OfferedStep(4, None, (), bad=(1,)),))
    assert offer.boxes(offer.steps[0]) == {(2, Box((), ()))}


@pytest.mark.parametrize("stored", [8, None, 5])
def test_newer_of_memory_and_storage_wins(stored):
    full = {i: (Box.full(shape),) for i, shape in enumerate(SHAPES)}
    offer = Offer("run", 0, 1, Held(full), (OfferedStep(7, sums_of(7, 1), own_sums(7, 0)),))
    found = agreement.choose([offer], SIZES, stored)
    if stored == 8:
        assert found == "it is of step 7, and storage has step 8"
    else:
        assert found == Choice("run", 7, sums_of(7, 1))


@pytest.mark.parametrize("at", ["own", "copies"])
def test_a_copy_that_differs_is_told_with_owner_and_holder(at):
    boxes = {1: {0: (Box((0,), (5,)),)}}
    sums, other = {(0, Box((0,), (5,))): 17}, {(0, Box((0,), (5,))): 18}
    own = digests_of(boxes, other if at == "own" else sums)
    copies = digests_of({0: boxes[1]}, other if at == "copies" else sums)
    first = {"sums": [3], "own": own, "copies": {}, "folded": 6}
    second = {"sums": [4], "own": {}, "copies": copies, "folded": 6}
    reports = [first, second]
    assert peers.judged(reports) == {"sums": [7], "bad": [(0, 1)]}
    late = [first, second | {"folded": 5}]  # of another step: nothing is known
    assert peers.judged(late) == {"sums": [7], "bad": []}


@st.composite
def layouts(draw: st.DrawFn, processes: int) -> Layout:
    """A grid of boxes, and the processes that hold each."""
    shape = draw(st.sampled_from([(4,), (4, 6), (2, 3, 4)]))
    cuts = tuple((0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))), n) for n in shape)
    some = st.sets(st.integers(0, processes - 1), min_size=1)
    held = [tuple(sorted(draw(some))) for _ in grid(cuts)]
    return Layout(cuts, tuple(held))


@pytest.mark.parametrize(
    ("domains", "copies", "expected"),
    [
        ("abcd", 1, {0: [1], 1: [0], 2: [3], 3: [2]}),
        ("aabb", 1, {0: [2], 1: [3], 2: [0], 3: [1]}),
        ("abc", 1, {0: [1], 1: [2], 2: [0]}),
        ("abcde", 1, {0: [1], 1: [0], 2: [3], 3: [4], 4: [2]}),
        ("abcd", 2, {0: [1, 2], 1: [2, 3], 2: [3, 0], 3: [0, 1]}),
        ("aab", 1, {0: [2], 1: [2], 2: [0]}),
    ],
)
def test_each_process_gets_as_much_as_it_sends_where_domains_are_alike(domains, copies, expected):
    cuts = (tuple(range(len(domains) + 1)),)
    layout = Layout(cuts, tuple((n,) for n in range(len(domains))))
    owners = tuple(range(len(domains)))
    leaf = Leaf("leaf", (len(domains),), "float32", 4, None, cuts, owners)
    structure: Any = SimpleNamespace(leaves=[leaf], layouts=[layout], touched=frozenset())
    found = holdings.parts_of(structure, None, domains, copies)
    assert {each.owners[0]: [*each.owners[1:]] for each in found} == expected
    assert all(each.sent == copies for each in found)


@given(st.data())
def test_copies_lie_in_other_domains_and_are_sent_where_no_device_there_has_the_box(data):
    processes = data.draw(st.integers(1, 6))
    domains = data.draw(st.lists(st.sampled_from("abc"), min_size=processes, max_size=processes))
    held = data.draw(st.lists(layouts(processes), min_size=1, max_size=4))
    copies = data.draw(st.integers(0, 2))
    shares = share_out(held, [4] * len(held), frozenset())
    dtype = data.draw(st.sampled_from(["float32", "int4"]))  # of which the second is not sent
    leaves = [
        Leaf(f"leaf{n}", tuple(c[-1] for c in s.cuts), dtype, 4, None, s.cuts, s.owners)
        for n, s in enumerate(shares)
    ]
    touched = frozenset(data.draw(st.sets(st.integers(0, len(leaves) - 1))))
    structure: Any = SimpleNamespace(leaves=leaves, layouts=held, touched=touched)
    pieces: Any = SimpleNamespace(batches=(), leaves=(), computed=frozenset(), scalar_leaves=())
    found = holdings.parts_of(structure, pieces, domains, copies)
    before = holdings.parts_of(structure, None, domains, copies)  # the update is not known yet
    assert before == [each for each in found if each.leaves[0] not in touched]
    for i, leaf in enumerate(leaves):
        assert [each.box for each in found if each.leaves == (i,)] == leaf.boxes
    alone, receivers = 0, dict[tuple[int, str], set[int]]()
    for each in found:
        (i,), (owner, *others) = each.leaves, each.owners
        layout = held[i]
        pairs = zip(grid(layout.cuts), layout.replicas, strict=True)
        (holders,) = [x for box, x in pairs if box.contains(each.box)]
        assert owner == dict(zip(leaves[i].boxes, leaves[i].owners, strict=True))[each.box]
        assert len({domains[x] for x in each.owners}) == len(each.owners)
        able = {domains[x] for x in holders} - {domains[owner]}
        given, sent = others[: len(others) - each.sent], others[len(others) - each.sent :]
        assert {*given} <= {*holders}
        assert not {*sent} & {*holders}
        assert len(given) == min(copies, len(able))
        wanted = copies if dtype == "float32" else len(given)
        assert len(others) == min(wanted, len({*domains}) - 1)
        for x in sent:
            receivers.setdefault((owner, domains[x]), set()).add(x)
        alone += 4 * each.box.size * (len(others) < copies)
    assert all(len(each) == 1 for each in receivers.values())
    if any(each.sent for each in found):  # which is known before the update is
        assert holdings.may_be_sent(structure, domains, copies)
    assert holdings.unprotected_bytes(structure, found, copies) == alone


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=3).filter(any), min_size=1, max_size=6),
    st.integers(0, 2**64 - 1),
)
def test_the_right_ones_of_boxes_with_different_bits_are_told(is_good, seed):
    boxes, rng = [Box((n,), (n + 1,)) for n in range(len(is_good))], random.Random(seed)
    right = {box: rng.getrandbits(64) for box in boxes}
    files = [
        {(0, box): right[box] if good else rng.getrandbits(64)}
        for box, holders in zip(boxes, is_good, strict=True)
        for good in holders
    ]
    torn = {(0, box): right[box] for box, each in zip(boxes, is_good, strict=True) if not all(each)}
    total = combine([*right.values()])
    assert agreement.right_sums(files, [total]) == torn
    assert agreement.right_sums(files, [rng.getrandbits(64)]) == {}
