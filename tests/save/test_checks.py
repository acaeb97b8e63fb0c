"""A delta that replay does not reproduce is found before it is saved, and no step is lost."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from adacheck_jax.proof import second_copy
from adacheck_jax.state import exported_update
from tests import support
from tests.save.loop import Loop, checked, computing, manifest_of
from tests.support import abstract, mesh_of, wait_for_compilers
from tests.update import test_separate

CHECKS = pytest.mark.parametrize("check", ["sample", "full"])


@pytest.fixture
def said(caplog):
    """What this library warns of."""
    return lambda: [x.getMessage() for x in caplog.records if x.name.startswith("adacheck_jax")]


def run_of(train_step, *, jit=True, pin=True):
    """A run on one device whose train step is given: (state, grads, chain) -> state."""
    recorder = adacheck.Recorder(optax.adamw(1e-2), pin=pin)
    chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    params = support.initial_params()
    state = {"params": params, "opt_state": chain.init(params), "step": jnp.int32(0)}

    def step(state, data):
        x, y = data
        loss = lambda p: jnp.mean((support.forward(p, x) - y) ** 2)  # noqa: E731
        return train_step(state, jax.grad(loss)(state["params"]), chain)

    return support.Run(recorder, state, jax.jit(step) if jit else step)


def plain(state, grads, chain):
    updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def halved(state, grads, chain):
    """Something after the recorder changes what it returned."""
    updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], jax.tree.map(lambda u: u / 2, updates))
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def projected(state, grads, chain):
    """Params are changed after the update: here one leaf is clamped."""
    state = plain(state, grads, chain)
    state["params"]["in"]["kernel"] = jnp.clip(state["params"]["in"]["kernel"], -0.1, 0.1)
    return state


@pytest.mark.covering(1, quick=1)
@CHECKS
@pytest.mark.parametrize("train_step", [projected, halved])
def test_an_update_that_is_not_the_recorders_costs_the_leaves_that_it_changes(
    tmp_path, said, train_step, check
):
    """Which is known in the next lineage, and after a restart."""
    loop = Loop(tmp_path, run_of(train_step), shadow=support.SHADOWS[check], max_deltas=2)
    loop.save(4)
    (warning,) = [each for each in said() if "replaying the update" in each]
    assert "params/in/kernel" in warning
    loop.reopen()
    loop.save(2)
    assert loop.check(mesh_of((4, 2))) == "BRRBRR"
    assert checked(tmp_path) == [check] * 4
    for step in loop.deltas:
        assert "params/in/kernel" in loop.stored(step)
        assert loop.unreplayed(step) == loop.stored(step)
        if train_step is projected:
            assert loop.stored(step) == {"params/in/kernel"}
    reasons = {manifest_of(tmp_path, step).caution.reason for step in range(2, 7)}
    assert all("params/in/kernel" in each for each in reasons)


def test_params_changed_after_a_restore_are_caught(tmp_path):
    loop = Loop(tmp_path, support.dict_run(mesh_of((4, 2))))
    loop.save(3)
    loop.reopen()
    loop.edit("params/out/kernel", lambda x: x * 1.5)
    loop.save(2)
    assert loop.check()[:3] == "BRR"


# --- edits by hand ------------------------------------------------------------------------------

RATE = "opt_state/1/adacheck_inner/hyperparams/learning_rate"
COUNT = "opt_state/1/adacheck_inner/0/count"
HYPER = functools.partial(optax.inject_hyperparams(optax.adamw), 1e-2)


def nothing(loop: Loop) -> None:
    pass


def edit(path: str, change: Callable[[Any], Any]) -> Callable[[Loop], None]:
    return lambda loop: loop.edit(path, change)


def put_back(loop: Loop, *, turns: bool = False) -> None:
    """Another state in place of this one, whose counters go on."""
    state, old = loop.run.state, loop.old
    node, inner = state["opt_state"][1], old["opt_state"][1].adacheck_inner
    if turns:
        inner = jax.tree.map(lambda x: x[::-1] if x.ndim else x, inner)
    inner = (inner[0]._replace(count=node.adacheck_inner[0].count), *inner[1:])
    opt_state = (state["opt_state"][0], node._replace(adacheck_inner=inner))
    loop.run.state = {**state, "params": old["params"], "opt_state": opt_state}


@dataclass(frozen=True)
class Edit:
    """An edit by hand around the update of step 4 of 6.

    Attributes:
        stored: leaf that the delta of step 4 stores; the others store none.
        is_wrong: True if replay gets it wrong, and it is not what the update consumed.
        also: True if step 4 may store other leaves besides, which depend on it.
        quick: checks of the cases that are no campaigns.
        checks: checks by which it is found.
    """

    before: Callable[[Loop], None] = nothing
    after: Callable[[Loop], None] = nothing
    stored: str = ""
    is_wrong: bool = False
    also: bool = False
    kinds: str = "BRRRRR"
    tx: Any = None
    updates: int = 1
    quick: str = "auto"
    checks: str = "sample full auto"


KERNEL, BIAS, SCALE = "params/in/kernel", "params/in/bias", "params/scale"
FEW, ONE = edit(BIAS, lambda x: x.at[7].set(3)), edit(KERNEL, lambda x: x.at[7, 7].set(3))
HALF, THIRD = edit(RATE, lambda x: x / 2), edit(RATE, lambda x: x / 3)
EDITS = {
    "none": Edit(quick="sample full"),
    "no update": Edit(kinds="BRRDRR", updates=0),
    "a leaf before": Edit(edit(SCALE, lambda x: x + 1), nothing, SCALE, True, True, quick="sample"),
    "an element": Edit(nothing, ONE, KERNEL, True, checks="full", quick="full"),
    "an element of few": Edit(nothing, FEW, BIAS, True, quick="sample"),
    "a counter before": Edit(edit(COUNT, lambda x: x * 0), nothing, COUNT, True, True),
    "rolled back": Edit(after=put_back, kinds="BRRBRR", quick="sample"),
    "swapped": Edit(after=functools.partial(put_back, turns=True), kinds="BRRBRR", quick="full"),
    "a rate before": Edit(HALF, nothing, RATE, tx=HYPER, quick=""),
    "a rate after": Edit(nothing, HALF, RATE, tx=HYPER, quick=""),
    "a rate both": Edit(HALF, THIRD, RATE, tx=HYPER),
    "a rate alone": Edit(nothing, HALF, RATE, kinds="BRRDRR", tx=HYPER, updates=0, quick="sample"),
}


@functools.cache
def program_of(tx):
    return support.dict_program(mesh_of((2, 2)), None if tx is None else tx())


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=[] if check in each.quick else pytest.mark.campaign)
        for name, each in EDITS.items()
        for check in each.checks.split()
    ],
)
def test_an_edit_by_hand_costs_what_it_changed(tmp_path, said, name, check):
    """And nothing of the steps after it."""
    own = EDITS[name]
    loop = Loop(tmp_path, program_of(own.tx).run(), shadow=support.SHADOWS[check])
    loop.save(2)
    loop.old = jax.tree.map(jnp.copy, loop.run.state)
    loop.save()
    own.before(loop)
    loop.train(own.updates)
    own.after(loop)
    jax.block_until_ready(loop.run.state)
    loop.put()
    loop.save(2)
    assert loop.check(mesh_of((4, 2))) == own.kinds
    is_found = own.is_wrong or own.kinds[3] == "B"
    assert any("does not give the state" in each for each in said()) == is_found == bool(said())
    assert bool(manifest_of(tmp_path, 6).caution.reason) == is_found
    for step, found in loop.deltas.items():
        checked = "full" if check == "auto" else check
        assert found.checked == ("stored" if step == 4 and not own.updates else checked)
        stored, wrong = loop.stored(step), loop.unreplayed(step)
        if step == 4 and own.also:
            assert own.stored in stored & wrong
        else:
            assert stored == ({own.stored} - {""} if step == 4 else set()), step
            assert wrong == (stored if own.is_wrong else set()), step
    if own.kinds[3] == "B":
        assert "does not give the state" in manifest_of(tmp_path, 4).reason


def test_a_leaf_that_is_wrong_in_a_few_elements_is_distrusted(tmp_path):
    """A sample found one by chance: it may miss the next."""
    loop = Loop(tmp_path)
    loop.save(2)
    for _ in range(3):
        loop.train()
        loop.edit(KERNEL, lambda x: x.at[:, 0].add(1.0))
        loop.put()
    loop.save()
    loop.check()
    assert [KERNEL in loop.unreplayed(step) for step in (2, 3, 4, 5, 6)] == [False, *[True] * 4]
    assert len(manifest_of(tmp_path, 6).caution.distrusted) == 1


# --- updates of all kinds -----------------------------------------------------------------------


def of_leaves(change):
    """An optimizer without a state, whose updates are those of each leaf."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(change, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def masked():
    """Steps every other row of one matrix; changes the containers that it is given in place."""

    def update(updates, state, params=None):
        del params
        mask = jnp.ones((support.WIDTH, 2 * support.WIDTH)).at[::2].set(0.0)
        updates["in"]["kernel"] = updates["in"]["kernel"] * mask
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def hidden():
    """Reads a counter that is in no state, as a callback does."""
    calls, spec = itertools.count(1), jax.ShapeDtypeStruct((), np.float32)
    factor = lambda: jax.pure_callback(lambda: np.float32(1 / next(calls)), spec)  # noqa: E731
    return of_leaves(lambda u: -0.1 * factor() * u)


def turned():
    """Steps each element by the one at the other end, too."""
    return of_leaves(lambda u: -0.1 * u - 0.01 * jnp.flip(u))


def by_size(u):
    """Steps by the first axis where it is long, in other operations than where it is short."""
    return (-0.1 if u.shape[:1] == (support.WIDTH,) else -0.2 + 0.1 * u) * u


HALVING = optax.conditionally_transform(optax.scale(0.5), lambda step: step % 2 == 0)
RANKED = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
WARMING = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50)
TXS: dict[str, tuple[Callable[[], Any], str]] = {
    "looks at shapes": (lambda: of_leaves(by_size), "sample"),
    "a constant of a shape": (lambda: of_leaves(lambda u: -u / max(u.shape, default=1)), "sample"),
    "decay by rank": (lambda: optax.adamw(1e-2, weight_decay=0.1, mask=RANKED), "sample"),
    "other places": (turned, "full"),
    "other places of one": (masked, "full"),
    "a callback": (hidden, ""),
    "a schedule": (lambda: optax.inject_hyperparams(optax.adamw)(WARMING), ""),
    "a condition": (lambda: optax.chain(HALVING, optax.adamw(1e-2)), ""),
    "keeps the first params": (optax.contrib.prodigy, ""),
    "keeps small first params": (optax.contrib.cocob, ""),
}
"""Updates, and how they are checked where that is told; shapes and ranks by samples."""


@pytest.mark.first(1, slow=7)
@pytest.mark.parametrize("name", TXS)
def test_an_update_of_any_kind_is_replayed_and_loses_no_step(tmp_path, said, name):
    tx, how = TXS[name]
    options = {"shadow": None} if how == "sample" else {}
    loop = Loop(tmp_path, support.dict_run(mesh_of((2, 2)), tx(), jnp.bfloat16), **options)
    loop.save(4)
    assert loop.check(mesh_of((4, 2))) == "BRRR" or not how
    assert not how or checked(tmp_path) == [how] * 3
    assert not said() or not how


@pytest.mark.first(1, slow=2)
@pytest.mark.parametrize("options", [{"pin": False}, {"jit": False}], ids=str)
def test_an_update_that_is_not_pinned_or_not_one_program_loses_no_step(tmp_path, options):
    loop = Loop(tmp_path, run_of(plain, **options))
    loop.save(4)
    loop.check()


@pytest.mark.first(1)
@pytest.mark.parametrize(("tx", "kind"), [(masked, "R"), (turned, "D")])
def test_what_nothing_can_check_is_stored_and_said(tmp_path, said, monkeypatch, tx, kind):
    """Where a sample does not tell, of all leaves or of one, and a copy would be too large."""
    monkeypatch.setattr(exported_update, "_COPIED_BYTES", 1000)
    loop = Loop(tmp_path, support.dict_run(mesh_of((4, 2)), tx(), dtype=jnp.bfloat16))
    loop.save(3)
    assert loop.check(mesh_of((2, 2))) == "B" + 2 * kind
    expected = {KERNEL} if kind == "R" else set()
    assert [loop.unreplayed(step) for step in (2, 3)] == [expected] * 2
    (warning,) = {*said()}
    assert "AdaCheckHandler(shadow=Shadow(on_devices=True))" in warning


@pytest.mark.parametrize("is_traced_anew", [False, True])
def test_an_update_that_reads_what_is_in_no_state_is_caught_at_the_first_delta(
    tmp_path, is_traced_anew
):
    rate = [0.1]
    run = support.dict_run(mesh_of((2, 2)), of_leaves(lambda u: -rate[0] * u))
    loop = Loop(tmp_path, run)
    run.advance()
    rate[0] = 0.2  # the compiled train step keeps the old one, and so does its trace
    if is_traced_anew:
        step = vars(run.train_step)["__wrapped__"]
        jax.eval_shape(functools.partial(step), run.state, support.batch(0))
    loop.save(3)
    assert loop.check(mesh_of((4, 2))) == "BRR"
    assert (loop.unreplayed(2) >= {KERNEL, SCALE}) == is_traced_anew
    assert bool(loop.unreplayed(2)) == is_traced_anew


@pytest.mark.parametrize(("elements", "expected"), [(4096, "full"), (4128, "sample")])
def test_a_sample_that_takes_every_leaf_whole_is_a_full_check(tmp_path, elements, expected):
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"wide": jnp.ones((elements // 8, 8)), "small": jnp.ones(8)}
    state = {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0)}
    step = jax.jit(lambda state, _: plain(state, state["params"], recorder))
    loop = Loop(tmp_path, support.Run(recorder, state, step), shadow=None)
    loop.save(3)
    assert checked(tmp_path) == [expected] * 2
    loop.check()


# --- compiling ----------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize("is_whole", [False, True], ids=["in pieces", "whole"])
def test_a_check_compiles_nothing_that_the_one_before_it_did(is_whole, tmp_path):
    loop = Loop(
        tmp_path, support.dict_run(mesh_of((1, 1)), turned() if is_whole else None), max_deltas=1
    )
    for _ in range(8):  # two lineages each: how far the save before has got is planned for too
        with support.compiled_programs() as compiled:
            loop.save(4)
        if not compiled:
            break
    assert compiled == []
    loop.manager.close()


def test_a_save_of_a_computed_step_neither_exports_nor_compiles_on_the_callers_thread(
    tmp_path, monkeypatch
):
    loop = Loop(tmp_path, support.dict_run(mesh_of((2, 2)), optax.adamw(3e-3)))
    worked, is_inside, caller = [], [], threading.current_thread()
    export = exported_update.ExportedUpdates._export

    def noted(event, *_, **__):
        if is_inside and threading.current_thread() is caller and "backend_compile" in event:
            worked.append(event)

    def exported(*args):
        noted("backend_compile of an export")
        return export(*args)

    monkeypatch.setattr(exported_update.ExportedUpdates, "_export", exported)
    jax.monitoring.register_event_duration_secs_listener(noted)
    try:
        for _ in range(5):
            jax.block_until_ready(loop.train())
            is_inside.append(True)
            loop.put()
            is_inside.clear()
            loop.manager.wait_until_finished()
            wait_for_compilers()
    finally:
        jax.monitoring.unregister_event_duration_listener(noted)
    assert not worked
    assert loop.check() == "BRRRR"


@pytest.mark.slow
def test_what_was_left_out_of_a_restore_is_no_parent_of_a_replay(tmp_path):
    """Only params are restored, and a fresh optimizer goes on from them."""
    loop = Loop(tmp_path)
    fresh = jax.tree.map(jnp.copy, loop.run.state)
    loop.save()
    loop.reopen()
    target = jax.tree.map(lambda _: ocp.PLACEHOLDER, fresh)
    target["params"] = abstract(fresh["params"])
    found = loop.manager.restore(1, args=adacheck.RestoreArgs(target))
    loop.run.state = {**fresh, "params": found["params"]}
    loop.train()
    loop.save(2)
    assert loop.check() == "BBR"


# --- recorded steps, and steps that are computed while they are saved ---------------------------


@pytest.mark.parametrize("check", support.SHADOWS)
def test_each_recorded_step_is_checked_also_if_it_is_saved_again(tmp_path, check):
    loop = Loop(tmp_path, shadow=support.SHADOWS[check])
    loop.save(2)
    assert loop.keep(3) == "rrr"
    loop.put()
    loop.save()
    assert checked(tmp_path) == ["full" if check == "auto" else check] * 5
    assert loop.check() == "BRRR"


def test_a_recorded_step_that_is_saved_at_once_is_checked_once(tmp_path, monkeypatch):
    """As recorded it is checked in the background, while the save checks it too."""
    advance = second_copy.Following._advance

    def slowly(*arguments):
        advance(*arguments)
        time.sleep(0.05)

    monkeypatch.setattr(second_copy.Following, "_advance", slowly)
    loop = Loop(tmp_path, shadow=adacheck.Shadow(on_devices=True))
    loop.save()
    for _ in range(3):
        assert loop.keep() == "r"
        jax.block_until_ready(loop.run.state)
        loop.put()
    assert loop.check() == "BRRR"
    assert not any(each.unreplayed for each in loop.deltas.values())


@pytest.mark.first(1, slow=3)
@pytest.mark.parametrize("check", support.SHADOWS)
def test_recorded_steps_that_replay_gets_wrong_are_lost_once_and_said(tmp_path, check):
    """It is found in the background; from then on each step is checked before it is kept."""
    loop, told = Loop(tmp_path, shadow=support.SHADOWS[check]), []
    loop.save()
    for _ in range(9):
        loop.train()
        if loop.number % 3 == 0:
            loop.edit(BIAS, lambda x: x + 1.0)
        jax.block_until_ready(loop.run.state)
        try:
            is_kept = loop.record()
        except ReplayError as error:
            told.append(str(error))
            loop.forget(*range(3, loop.number))
            is_kept = False
        if not is_kept or loop.number == 10:
            loop.put(force=True)
    loop.manager.wait_until_finished()
    (message,) = told
    assert "Recorded steps that are not saved: 3" in message
    assert message.endswith("save that step instead of recording it.")
    assert BIAS in message
    assert {1, 2, 9, 10} <= loop.states.keys()  # a few steps may pass before it is found
    assert checked(tmp_path)[-1] == ("full" if check == "auto" else check)
    loop.check()


def test_a_step_that_is_computed_while_it_is_saved_is_refused_once_if_it_is_wrong(tmp_path):
    """It cannot be stored any more; from then on, and in another process, saves wait."""
    loop = Loop(tmp_path)
    loop.save(3)
    wait_for_compilers()
    with computing():
        loop.train()
        loop.edit(BIAS, lambda x: x + 1.0)
        loop.put()
        loop.fail(ReplayError, r"step 4: .*params/in/bias.*not saved")
        for number in range(6):
            if number == 3:
                loop.reopen()
            loop.train()
            loop.edit(BIAS, lambda x, number=number: x + number % 2)
            loop.put()
    assert loop.check() == "BRRBRRRRR"
    assert BIAS in manifest_of(tmp_path, 10).caution.reason


def test_a_recorded_step_that_is_wrong_takes_no_step_before_it_along(tmp_path):
    loop = Loop(tmp_path)
    loop.save(3)
    wait_for_compilers()
    with computing():
        assert loop.keep() == "r"
        loop.train()
        loop.edit(BIAS, lambda x: x + 1.0)
        assert loop.record()
    loop.train(2)
    jax.block_until_ready(loop.run.state)
    with pytest.raises(ReplayError, match="not saved: 5, and neither is this"):
        loop.put()
    loop.forget(5, 6)
    loop.number += 1
    loop.put()
    loop.check()


def test_nothing_is_recorded_behind_a_save_that_failed(tmp_path):
    loop = Loop(tmp_path)
    loop.save(2)
    old = jax.tree.map(jnp.copy, loop.run.state)
    assert loop.keep() == "r"
    loop.run.state = old  # rolled back by one update, which is made again
    assert loop.keep() == "r"
    jax.block_until_ready(loop.train())
    with pytest.raises(adacheck.AdaCheckError, match="not saved: 4, and neither is this one; "):
        loop.put()
    loop.forget(4, 5)
    assert loop.keep() == "s"
    loop.save()
    loop.check()


# --- updates that are programs of their own, and several recorders ------------------------------


IDENTITIES = {"none": (nothing, nothing), "a rate before": (edit(RATE, lambda x: x / 2), nothing)}
IDENTITIES |= {"a rate after": (nothing, edit(RATE, lambda x: x / 2))}


@pytest.mark.first(2, slow=3)
@pytest.mark.parametrize("name", ["none", "a rate before", "a rate after"])
def test_the_arrays_that_a_separate_update_returned_are_known_by_identity(tmp_path, name):
    """Also after a restore."""
    before, after = IDENTITIES[name]
    loop = Loop(tmp_path, test_separate.separate_run(mesh_of((2, 2)), HYPER()))
    loop.run.advance()
    loop.save(3)
    before(loop)
    loop.train()
    after(loop)
    loop.put()
    loop.reopen()
    loop.save(2)
    assert checked(tmp_path) == ["identity"] * 5
    assert not any(each.unreplayed for each in loop.deltas.values())
    assert loop.check() == "BRRRRR"


@pytest.mark.slow
def test_other_arrays_than_a_separate_update_returned_are_compared_in_full_from_then_on(tmp_path):
    loop = Loop(tmp_path, test_separate.separate_run(mesh_of((2, 2)), HYPER()))
    loop.run.advance()
    loop.save(3)
    loop.train()
    loop.run.state = loop.run.state.replace(
        params=jax.tree.map(lambda x: x * 1.0, loop.run.state.params)
    )
    loop.edit(BIAS, lambda x: x + 1.0)
    loop.put()
    loop.save(3)
    assert loop.check() == "BRRBRRR"
    assert checked(tmp_path) == ["identity"] * 2 + ["full"] * 3


@pytest.mark.first(1, slow=2)
@CHECKS
def test_of_several_recorders_those_are_replayed_that_made_an_update(tmp_path, check):
    recorders = {name: adacheck.Recorder(optax.sgd(1e-2)) for name in ("a", "b")}
    params = {name: {"w": jnp.ones((8, 16)) * n} for n, name in enumerate(recorders, 1)}
    state = {
        name: {"params": params[name], "opt_state": each.init(params[name])}
        for name, each in recorders.items()
    }

    @functools.partial(jax.jit, static_argnums=1)
    def step(state, which):
        state = dict(state)
        for name in which:
            own = state[name]
            grads = jax.tree.map(jnp.sin, own["params"])
            updates, opt_state = recorders[name].update(grads, own["opt_state"], own["params"])
            params = optax.apply_updates(own["params"], updates)
            state[name] = {"params": params, "opt_state": opt_state}
        return state

    which = iter(["ab", "ab", "a", "b", "", "ab", "b"])
    run: Any = support.Run(recorders, state, lambda state, _: step(state, next(which)))
    loop = Loop(tmp_path, run, shadow=support.SHADOWS[check])
    for number in range(7):
        jax.block_until_ready(loop.train())
        if number == 3:
            loop.edit("b/params/w", lambda x: x.at[3].add(1.0))
        loop.put()
    loop.check()
    found = loop.deltas
    assert [each.updates for each in found.values()] == [(0, 1), (0,), (1,), (), (0, 1), (1,)]
    assert [loop.unreplayed(step) for step in found] == [
        *(set(), set(), {"b/params/w"}, set(), set(), set())
    ]
