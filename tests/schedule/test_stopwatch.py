"""Seconds of steps and saves, by a clock that a test moves."""

from adacheck_jax.schedule.stopwatch import Stopwatch


class Loop:
    """A training loop, as its stopwatch sees it; it begins with a base that blocks 2 seconds.

    Attributes:
        now_s: reading of its clock.
    """

    def __init__(self):
        self.now_s = 1000.0
        self.watch = Stopwatch(lambda: self.now_s)
        self.watch.stay()  # nothing was called yet
        self.saves(100, 2, is_base=True)

    def saves(self, after_s, blocking_s, *, is_base=False, deltas=1, durable_s=None):
        self.now_s += after_s
        self.watch.enter(durable_s)
        self.now_s += blocking_s
        self.watch.leave_saved(is_base=is_base, deltas=deltas)

    def defers(self, after_s, blocking_s, *, refused=False):
        self.now_s += after_s
        self.watch.enter(None)
        self.now_s += blocking_s
        if not refused:
            self.watch.leave_deferred()


def test_what_lies_between_two_calls_is_a_step_and_of_many_the_median_is_told():
    loop = Loop()
    assert loop.watch.take() == ()
    loop.saves(5, 1)
    assert loop.watch.take() == (("base_blocking_s", 2.0, 1), ("step_s", 5.0, 1))
    loop.defers(6, 0.5)
    assert loop.watch.take() == (("delta_blocking_s", 1.0, 1), ("step_s", 6.0, 1))
    loop.defers(5, 0.5, refused=True)
    loop.saves(0.25, 1)  # of the same step
    assert loop.watch.take() == (("defer_blocking_s", 0.5, 1), ("step_s", 5.75, 1))
    for step_s in (3, 4, 90):
        loop.defers(step_s, 0.5)
    assert ("step_s", 4.0, 1) in loop.watch.take()


def test_what_a_save_does_after_it_was_planned_blocks_too():
    loop = Loop()
    loop.now_s += 3
    loop.watch.stay()
    loop.saves(5, 1, durable_s=loop.now_s + 4)
    expected = {"base_blocking_s": 5.0, "base_write_s": 4.0, "step_s": 5.0}
    assert {name: s for name, s, _ in loop.watch.take()} == expected


def test_a_write_is_counted_from_where_its_save_returned_to_where_it_is_durable():
    loop = Loop()
    loop.saves(5, 1, deltas=4, durable_s=loop.now_s + 3)
    assert ("base_write_s", 3.0, 1) in loop.watch.take()
    durable_s = loop.now_s + 0.5
    loop.defers(5, 0)
    loop.saves(5, 1, durable_s=durable_s)
    loop.saves(5, 1, durable_s=durable_s)
    loop.saves(5, 1)  # of one that did not end in time nothing is told
    assert [each for each in loop.watch.take() if "write" in each[0]] == [
        ("delta_write_s", 0.5, 4),
        ("delta_write_s", 0.0, 1),  # it was durable before its call returned
    ]
