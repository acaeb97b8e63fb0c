"""Versions that count, the way to the newest, and what is pruned."""

from adacheck_jax.publish import plan
from adacheck_jax.publish.records import Base, Claim, ParentVersion, Version


def known(sequence: int, parent: int | None, epoch: int = 0, name: str = "") -> Version:
    """A version whose checksum is its number, and a name where two have the same."""
    link = None if parent is None else ParentVersion(parent, f"{parent}")
    return Version(sequence, epoch, sequence, link, "", (), (), 0, checksum=f"{sequence}{name}")


def base(sequence: int, of: str | None = None) -> Base:
    return Base(sequence, 0, f"{sequence}" if of is None else of, ())


def ends(found: tuple[Version, ...]) -> list[int]:
    return [each.sequence for each in found]


CHAIN = {n: known(n, n - 1 if n else None) for n in range(10)}


def test_a_publisher_that_was_taken_over_counts_no_more():
    claims = [Claim(0, 0, ""), Claim(1, 5, ""), Claim(2, 5, ""), Claim(3, 8, "")]
    for epoch, first, last in [(0, 0, 4), (2, 5, 7), (3, 8, 12)]:
        assert all(plan.counts(known(n, None, epoch), claims) for n in range(first, last + 1))
    for epoch, first in [(0, 5), (1, 5), (2, 8)]:
        assert not any(plan.counts(known(n, None, epoch), claims) for n in range(first, 13))
    assert plan.counts(known(3, None, 4), claims), "a claim that cannot be read"


def test_a_follower_goes_on_as_far_as_parents_lead():
    assert ends(plan.onwards(CHAIN[3], CHAIN.values())) == [4, 5, 6, 7, 8, 9]
    without = [each for n, each in CHAIN.items() if n != 6]
    assert ends(plan.onwards(CHAIN[3], without)) == [4, 5]
    assert ends(plan.onwards(CHAIN[3], CHAIN.values(), {"7"})) == [4, 5, 6]
    assert ends(plan.onwards(known(3, 2, name="other"), CHAIN.values())) == []


def test_of_two_versions_that_build_on_one_the_later_goes_on():
    given_up = known(4, 3, name="given up")
    rest = [CHAIN[3], given_up, known(5, 3), known(6, 5)]
    assert ends(plan.onwards(CHAIN[3], rest)) == [5, 6]


def test_late_joiners_begin_at_the_newest_base_of_a_version():
    found = plan.from_base([base(0), base(4), base(7, "another")], CHAIN)
    assert found is not None
    assert found.start == CHAIN[4]
    assert ends(found.deltas) == [5, 6, 7, 8, 9]
    assert found.end == CHAIN[9]
    assert plan.from_base([base(12)], CHAIN) is None
    assert plan.from_base([], CHAIN) is None


def test_pruning_leaves_the_versions_to_keep_and_a_base_before_them():
    sequences, bases = [*range(20)], [0, 6, 12, 18]
    for keep in range(1, 25):
        first = plan.oldest_kept(sequences, bases, keep)
        assert first in bases
        assert first <= max(0, 20 - keep)
        assert not [each for each in bases if first < each <= 20 - keep]
    assert plan.oldest_kept([], [], 1) == 0
    assert plan.oldest_kept([5, 6, 7], [], 1) == 0, "nothing can be read without them"


def test_a_base_is_due_after_some_versions_or_as_many_bytes():
    assert not plan.base_is_due(9, 99, 100, 10)
    assert plan.base_is_due(10, 0, 100, 10)
    assert plan.base_is_due(1, 100, 100, 10)
    assert not plan.base_is_due(1, 0, 0, 10)
