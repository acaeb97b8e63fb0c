"""The phases of a step on its way: the moves of the table alone, and nobody waits forever."""

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.plan.decision import Decision
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.save.pending import MOVES, Pending, Phase

LEAVES = ("w", "b")
STRUCTURE: Any = SimpleNamespace(
    leaves=[SimpleNamespace(path=path) for path in LEAVES], counts=(), ephemeral=frozenset()
)


class Comparison:
    """One that finds leaves wrong, or breaks, once it is told that the devices are ready."""

    def __init__(self, findings, ready):
        self._findings, self._ready = findings, ready

    def __call__(self, updates):
        assert self._ready.wait(20)
        if self._findings is None:
            raise RuntimeError("the device is gone")
        return dict.fromkeys(self._findings, 1.0)


class Proof:
    """A shadow that has other fingerprints in some leaves; None if it is at another step."""

    def __init__(self, wrong, own, log):
        self._wrong, self._own, self._log = wrong, own, log
        self.begun = self.ended = False

    def begin(self, change):
        if not self.begun:
            self.begun = True
            self._log.append(change.step)

    def sums(self):
        assert self.begun
        if self._wrong is None:
            return None
        return {i: 100 + i + (i in self._wrong) for i in range(len(LEAVES))}

    def is_trusted(self):
        return True

    def end(self):
        self.ended = True


def step_of(number, worker, before, findings, wrong, spare, log, ready):
    counts = (number,)
    plan = SavePlan(
        *(number, Decision("replay", "one update", (0,)), counts, STRUCTURE, None, (), ()),
        spare=(1,) if spare else (),
    )
    sums = SimpleNamespace(sums=lambda: {0: 100, 1: 101}, holds_blocks=False)
    own = {"fingerprints": sums, "counters": {}, "spare": {1: {}}, "kept": {}, "staged": {}}
    copies: Any = SimpleNamespace(**own, viewed=())
    delta: Any = SimpleNamespace(blocks={}) if spare else None
    args: Any = (plan, f"step {number}", copies, delta, {}, worker)
    pending = Pending(*args, before=before, again=None)
    proof: Any = Proof(wrong, pending, log)
    compare: Any = Comparison(findings, ready)
    pending.proof, pending.compare = proof, compare
    return pending, proof


leaves = st.sets(st.integers(0, 1))
outcomes = st.tuples(st.none() | leaves, st.none() | leaves, st.booleans())
waits = st.sampled_from(["settled", "compared", "verify"])


@given(st.lists(outcomes, min_size=1, max_size=5), st.data())
def test_steps_go_through_the_phases_of_the_table_whoever_waits_for_which(cases, data):
    log, ready, seen = [], threading.Event(), dict[int, list[Phase]]()
    with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(4) as others:
        steps, proofs, before = [], [], None
        for number, (findings, wrong, spare) in enumerate(cases):
            own, proof = step_of(number, worker, before, findings, wrong, spare, log, ready)
            seen[number] = [own.phase]
            move = own._waits

            def noted(phase, future, number=number):
                future.add_done_callback(
                    lambda f: seen[number].append(Phase.FAILED if f.exception() else phase)
                )

            for phase, future in move.items():
                noted(phase, future)
            steps.append(own)
            proofs.append(proof)
            before = own
        order = data.draw(st.lists(st.tuples(st.sampled_from(range(len(steps))), waits)))
        asked = [(n, name, others.submit(getattr(steps[n], name))) for n, name in order]
        ready.set()
        ends: list[tuple[int, str, Future[Any]]] = [
            *asked,
            *((n, "verify", others.submit(each.verify)) for n, each in enumerate(steps)),
        ]
        for number, name, future in ends:
            error = future.exception(timeout=20)
            findings, wrong, spare = cases[number]
            healed = {1}.intersection(findings or ()) if spare else set()
            # What is stored whole is nothing that the shadow could be wrong in.
            is_wrong = bool(((findings or set()) | (wrong or set())) - healed)
            if findings is None:
                assert (error is None) == (name == "settled")
            elif name == "verify":
                assert isinstance(error, ReplayError) == is_wrong, (findings, wrong, spare)
            else:
                assert error is None
    for own, proof in zip(steps, proofs, strict=True):
        assert own.phase in (Phase.PROVED, Phase.FAILED)
        assert (own.phase is Phase.FAILED) == any(
            future.exception() is not None for future in own._waits.values()
        )
        assert proof.ended
        path = list(dict.fromkeys(seen[own.step]))
        assert all(after in MOVES[first] for first, after in itertools.pairwise(path))
        assert own.saved <= {1}
    assert log == sorted(log), "the shadow follows the steps in their order"


def test_a_failure_is_raised_for_whoever_waits_later_and_not_before():
    ready = threading.Event()
    ready.set()
    with ThreadPoolExecutor(1) as worker:
        own, _ = step_of(3, worker, None, {0}, set(), False, [], ready)
        with pytest.raises(ReplayError, match=r"step 3.*in w"):
            own.verify()
        assert own.settled().step == own.compared().step == 3
        assert own.phase is Phase.FAILED
        assert own.refused is not None


def test_a_step_that_was_given_up_is_not_proved():
    with ThreadPoolExecutor(1) as worker:
        own, proof = step_of(3, worker, None, {0}, {0}, False, [], threading.Event())
        own.release()
        assert own.verify().step == 3, "nothing is left to compare, and nobody writes it"
        assert not proof.begun
        with pytest.raises(AdaCheckError, match="given up"):
            own.packed()


def test_every_phase_has_its_moves_and_no_move_leads_back():
    assert MOVES.keys() == {*Phase}
    order = [Phase.STAGED, Phase.SETTLED, Phase.COMPARED, Phase.PROVED]
    for first, after in itertools.pairwise(order):
        assert MOVES[first] == {after, Phase.FAILED}
    assert not MOVES[Phase.PROVED] | MOVES[Phase.FAILED]
