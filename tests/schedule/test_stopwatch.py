"""Seconds of steps and saves, by a clock that a test moves."""

from adacheck_jax.schedule.stopwatch import Stopwatch


class Clock:
    """A clock that stands still.

    Attributes:
        now_s: its reading.
    """

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Loop:
    """A training loop, as its stopwatch sees it."""

    def __init__(self):
        self.clock = Clock()
        self.watch = Stopwatch(self.clock)

    def saves(self, after_s, blocking_s, *, is_base=False, deltas=1, durable_s=None):
        self.clock.now_s += after_s
        self.watch.enter(durable_s)
        self.clock.now_s += blocking_s
        self.watch.leave_saved(is_base=is_base, deltas=deltas)

    def defers(self, after_s, blocking_s, *, refused=False):
        self.clock.now_s += after_s
        self.watch.enter(None)
        self.clock.now_s += blocking_s
        if not refused:
            self.watch.leave_deferred()


def test_what_lies_between_two_calls_is_a_step():
    loop = Loop()
    loop.saves(100, 2, is_base=True)
    assert loop.watch.take() == ()
    loop.saves(5, 1)
    assert loop.watch.take() == (("base_blocking_s", 2.0, 1), ("step_s", 5.0, 1))
    loop.defers(6, 0.5)
    assert loop.watch.take() == (("delta_blocking_s", 1.0, 1), ("step_s", 6.0, 1))
    loop.saves(7, 1)
    assert loop.watch.take() == (("defer_blocking_s", 0.5, 1), ("step_s", 7.0, 1))


def test_what_a_save_does_after_it_was_planned_blocks_too():
    loop = Loop()
    loop.watch.stay()  # nothing was called yet
    loop.saves(100, 2, is_base=True)
    loop.clock.now_s += 3
    loop.watch.stay()
    loop.saves(5, 1, durable_s=loop.clock.now_s + 4)
    expected = {"base_blocking_s": 5.0, "base_write_s": 4.0, "step_s": 5.0}
    assert {name: s for name, s, _ in loop.watch.take()} == expected


def test_a_write_ends_when_it_is_durable_and_is_counted_from_where_its_save_returned():
    loop = Loop()
    loop.saves(100, 2, is_base=True)
    durable_s = loop.clock.now_s + 3
    loop.saves(5, 1, deltas=4, durable_s=durable_s)
    assert ("base_write_s", 3.0, 1) in loop.watch.take()
    durable_s = loop.clock.now_s + 0.5
    loop.defers(5, 0)
    loop.saves(5, 1, durable_s=durable_s)
    loop.saves(5, 1, durable_s=durable_s)
    assert [each for each in loop.watch.take() if "write" in each[0]] == [
        ("delta_write_s", 0.5, 4),
        ("delta_write_s", 0.0, 1),  # it was durable before its call returned
    ]


def test_a_write_that_did_not_end_is_not_measured():
    loop = Loop()
    loop.saves(100, 2, is_base=True)
    loop.saves(5, 1)
    assert "base_write_s" not in {name for name, _, _ in loop.watch.take()}


def test_a_step_that_was_refused_and_then_saved_is_one_step():
    loop = Loop()
    loop.saves(100, 2, is_base=True)
    loop.defers(5, 0.5, refused=True)
    loop.saves(0.25, 1)
    assert ("step_s", 5.75, 1) in loop.watch.take()


def test_of_many_steps_the_median_is_told():
    loop = Loop()
    loop.saves(100, 2, is_base=True)
    for step_s in (3, 4, 90):
        loop.defers(step_s, 0.5)
    assert {name: s for name, s, _ in loop.watch.take()}["step_s"] == 4.0
