"""Arrays that lie in memory of numpy's, which the training loop fills anew between its saves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device.loops import xla_call
from adacheck_jax.errors import MismatchError, StorageError
from adacheck_jax.memory.shadow_state import ShadowState
from adacheck_jax.proof.sample import Sampling
from adacheck_jax.publish import publisher
from adacheck_jax.save import commit
from adacheck_jax.save.pending import Pending
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store import delta_writer, host_memory, volumes
from adacheck_jax.store.packs import writer
from tests import support
from tests.save.loop import deltas_of, kinds

SMALL, LARGE = 1 << 10, 1 << 17
"""Elements of what is copied before a save returns, and of what is viewed."""


def memory_of(count: int, value: float = 0) -> np.ndarray:
    """Memory that lies as XLA:CPU wants it, and so is not copied."""
    buffer = host_memory.empty(4 * count).view(np.float32)
    buffer[:] = value
    return buffer


def lying_in(buffer: np.ndarray) -> jax.Array:
    array = jax.device_put(buffer)
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data
    return array


class Loop:
    """A run whose state has, beside what it trains, what ``make`` gives of a buffer."""

    def __init__(
        self, root: Any, count: int = LARGE, make: Callable[[Any], Any] = lying_in, **options: Any
    ) -> None:
        recorder = adacheck.Recorder(optax.adam(1e-2))
        params = {"w": jnp.arange(8.0), "v": jnp.ones((256, 512))}
        self._trained = params, recorder.init(params)

        @jax.jit
        def update(params: Any, opt: Any) -> Any:
            updates, opt = recorder.update(params, opt, params)
            return optax.apply_updates(params, updates), opt

        self._update, self.buffer, self._make, self.saved = update, memory_of(count), make, {}
        manager = adacheck.checkpoint_manager(root, recorder, max_to_keep=None, **options)
        self.manager, self.root, self.number = manager, root, 0

    def state(self, buffer: np.ndarray | None = None) -> Any:
        """The state of the next step, of which a buffer tells; little of it differs at each."""
        buffer = self.buffer if buffer is None else buffer
        self.number += 1
        buffer[:] = np.random.default_rng(0).standard_normal(buffer.size, np.float32)
        buffer[::50] = self.number
        params, opt = self._trained = jax.block_until_ready(self._update(*self._trained))
        state = {"params": params, "opt": opt, "seen": self._make(buffer)}
        self.saved[self.number] = support.host_copy(state)
        return state

    def save(self, **given: Any) -> None:
        state = self.state(**given)
        assert self.manager.save(self.number, args=adacheck.SaveArgs(state))

    def step(self) -> None:
        """Saves a step, and waits until that has ended."""
        self.save()
        self.manager.wait_until_finished()

    def check(self, lost: tuple[int, ...] = ()) -> str:
        """Restores every step, of which none but some is lost; gives a letter of each directory."""
        self.manager.close()
        wanted = support.abstract(jax.tree.map(jnp.asarray, self.state()))
        del self.saved[self.number]
        with adacheck.checkpoint_manager(self.root) as manager:
            for step in self.saved.keys() - {*lost}:
                found = manager.restore(step, args=adacheck.RestoreArgs(wanted))
                support.assert_same_bits(found, self.saved[step])
        return "".join(kinds(self.root))


WAYS = {
    "replayed": {},
    "sampled": {"shadow": None},
    "second copy": {"shadow": adacheck.Shadow(on_devices=True)},
    "bits": {"delta": "bits"},
}
ARRAYS = {"array": lying_in, "numpy": lambda buffer: buffer, "twice": lambda x: [lying_in(x)] * 2}


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("make", ARRAYS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_reads_nothing_of_the_one_before_that_was_filled_anew(tmp_path, way, make, count):
    loop = Loop(tmp_path, count, ARRAYS[make], **WAYS[way])
    for _ in range(4):
        loop.step()
    loop.buffer[:] = -1
    assert loop.check() == ("BDDD" if way == "bits" else "BRRR")


def test_two_buffers_are_filled_in_turns_while_saves_run(tmp_path, monkeypatch):
    """That of the step before is filled once differences from it were chosen."""
    loop, other = Loop(tmp_path), memory_of(LARGE)
    chosen, filled = threading.Event(), threading.Event()

    def fill(*args: Any, inner: Any = delta_writer.DeltaWriter._fill) -> None:
        chosen.set()
        assert filled.wait(60)
        inner(*args)

    monkeypatch.setattr(delta_writer.DeltaWriter, "_fill", fill)
    loop.step()
    for buffer, before in [(other, loop.buffer), (loop.buffer, other)] * 2:
        chosen.clear()
        filled.clear()
        loop.save(buffer=buffer)
        assert chosen.wait(60)
        before[:] = -1
        filled.set()
        loop.manager.wait_until_finished()
    assert loop.check() == "BRRRR"


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
def test_recorded_steps_are_out_of_the_arrays_once_the_manager_has_waited(tmp_path, count):
    loop = Loop(tmp_path, count)
    loop.step()
    for _ in range(3):
        assert loop.manager.handler.record_step(loop.state(), loop.number)
        loop.manager.wait_until_finished()
        loop.buffer[:] = -1
    loop.step()
    assert loop.check() == "BR"
    assert [*deltas_of(tmp_path)] == [2, 3, 4, 5]


def test_a_base_in_the_background_has_what_its_step_had(tmp_path, monkeypatch):
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))
    loop = Loop(tmp_path, max_deltas=adacheck.AdaptivePolicy(most_deltas=4))
    while (found := "".join(kinds(tmp_path)) if loop.number else "").count("B") < 2:
        loop.step()
        assert loop.number < 40, found
    loop.step()
    assert "BR" in loop.check()[1:]


@pytest.mark.parametrize("base", [True, False], ids=["base", "delta"])
def test_what_storage_refused_is_written_as_it_was(tmp_path, monkeypatch, base):
    loop, is_away = Loop(tmp_path), True

    def write(*args: Any, inner: Any = None, **kwargs: Any) -> Any:
        if is_away:
            raise OSError(5, "Input/output error")
        return inner(*args, **kwargs)

    if not base:
        loop.step()
    place, name = (volumes.Volume, "write") if base else (writer, "write_pack")
    inner = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: write(*args, inner=inner, **more))
    loop.save()
    with pytest.raises(StorageError, match="steps that are in memory"):
        loop.manager.wait_until_finished()
    loop.buffer[:] = -1
    is_away = False
    loop.step()
    assert loop.check() == ("BR" if base else "BRR")


@pytest.mark.parametrize(
    ("reader", "name"), [(ShadowState, "load"), (Sampling, "baseline")], ids=["shadow", "sample"]
)
def test_a_save_has_not_ended_while_anything_reads_its_arrays(tmp_path, monkeypatch, reader, name):
    """Of a base some is read behind the save; here after the commit, if that would not wait."""
    events, committed = list[str](), threading.Event()
    inner, commits = getattr(reader, name), commit.commit

    def read(*args: Any, **more: Any) -> Any:
        committed.wait(0.3)
        result = inner(*args, **more)
        events.append("read")
        return result

    def end(*args: Any) -> Any:
        events.append("committed")
        committed.set()
        return commits(*args)

    monkeypatch.setattr(reader, name, read)
    monkeypatch.setattr(commit, "commit", end)
    loop = Loop(tmp_path)
    loop.step()
    assert events[:2] == ["read", "committed"]
    loop.step()
    assert loop.check() == "BR"


def test_params_that_changed_before_their_own_program_took_them_are_saved(tmp_path):
    """What ``separate_update`` takes is known by its arrays, and these may have other elements."""
    recorder, buffer = adacheck.Recorder(optax.adam(1e-2)), memory_of(LARGE, 1)
    update, saved = adacheck.separate_update(recorder), {}
    params = {"w": lying_in(buffer)}
    opt = recorder.init(params)
    with adacheck.checkpoint_manager(tmp_path, recorder, max_to_keep=None) as manager:
        for step in range(4):
            state = {"params": params, "opt": opt}
            saved[step] = support.host_copy(state)
            wanted = support.abstract(state)
            manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            buffer[:] = 2
            params, opt = update({"w": jnp.ones(LARGE)}, opt, params)
        for step, expected in saved.items():
            found = manager.restore(step, args=adacheck.RestoreArgs(wanted))
            support.assert_same_bits(found, expected)
    assert "".join(kinds(tmp_path)) == "BBRR"


@pytest.mark.parametrize("kind", ["base", "delta", "recorded"])
def test_arrays_that_change_while_they_are_saved_are_named(tmp_path, monkeypatch, kind):
    """Between their fingerprints and the copies of them, or what is written of them."""
    loop, changes = Loop(tmp_path), False

    def write(*args: Any, inner: Any = volumes.Volume.write) -> Any:
        if changes:
            loop.buffer[:] = -1
        return inner(*args)

    def bring(step: Any, inner: Any = Pending._bring) -> None:
        step.sums()
        if changes:
            loop.buffer[:] = -1
        inner(step)

    patched = ("_bring", bring), ("write", write)
    xla_call.wait()
    monkeypatch.setattr(volumes.Volume if kind == "base" else Pending, *patched[kind == "base"])
    if kind != "base":
        loop.step()
    changes = True
    if kind == "recorded":
        assert loop.manager.handler.record_step(loop.state(), loop.number)
        loop.manager.wait_until_finished()
        told = functools.partial(
            loop.manager.save, 9, args=adacheck.SaveArgs({"seen": loop.buffer})
        )
    else:
        loop.save()
        told = loop.manager.wait_until_finished
    lost = loop.number
    with pytest.raises(MismatchError, match=r"found that seen changed meanwhile.*no part in it"):
        told()
    changes = False
    loop.step()
    loop.step()
    assert loop.check((lost,)) == ("BR" if kind == "base" else "BBR")


def test_what_a_first_base_is_written_from_is_looked_at_and_not_what_was_copied_of_it(
    tmp_path, monkeypatch
):
    """Copies for the next save are made while it is written; equal leaves are written once."""
    loop, copied = Loop(tmp_path), threading.Event()

    def keep(step: Pending, *args: Any, inner: Any = Pending.keep) -> None:
        inner(step, *args)
        copied.set()

    def write(*args: Any, inner: Any = volumes.Volume.write) -> Any:
        assert copied.wait(60)
        loop.buffer[:] = -1
        return inner(*args)

    state = loop.state()
    twin = jnp.array(loop.buffer)
    with monkeypatch.context() as patched:
        patched.setattr(Pending, "keep", keep)
        patched.setattr(volumes.Volume, "write", write)
        loop.manager.save(1, args=adacheck.SaveArgs({**state, "twin": twin}))
        with pytest.raises(MismatchError, match="found that seen changed meanwhile"):
            loop.manager.wait_until_finished()
    assert loop.manager.all_steps() == []


def test_params_that_change_while_they_are_published_are_named(tmp_path, monkeypatch):
    buffer, is_changed = memory_of(SMALL, 1), True

    def weights(*arguments: Any, inner: Any = publisher.Weights) -> Any:
        buffer[:] = 2 if is_changed else buffer
        return inner(*arguments)

    monkeypatch.setattr(publisher, "Weights", weights)
    with adacheck.publish.Publisher(tmp_path) as own:
        with pytest.raises(MismatchError, match="found that w changed"):
            own.publish({"w": lying_in(buffer)}, version=1, wait=True)
        is_changed = False
        own.publish({"w": lying_in(buffer)}, version=2, wait=True)
    other = adacheck.publish.Follower(tmp_path, {"w": jnp.ones(SMALL)})
    assert np.all(np.asarray(other.wait_for(2)["w"]) == 2)
