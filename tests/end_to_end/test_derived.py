"""Moving averages and target networks beside the optimizer cost a delta nothing, to the bit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import adacheck_jax as adacheck
from adacheck_jax.device import transfer
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from tests import support
from tests.end_to_end.test_state_kinds import (
    assert_only_changes_are_stored,
    base_of,
    delta_of,
    kinds,
    stored_paths,
)
from tests.save.loop import assert_all_restorable
from tests.save.test_background_bases import bases_of, trained
from tests.support import Program, Run, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

OTHERS = [(1, 1), (8, 1)]
MESHES = {
    "one device": lambda: mesh_of((1, 1)),
    "8x1": lambda: mesh_of((8, 1)),
    "4x2": lambda: mesh_of((4, 2)),
    "4x2 explicit": lambda: mesh_of((4, 2), AxisType.Explicit),
}
DTYPES = {"float32": (jnp.float32, jnp.float32), "short": (jnp.float32, jnp.bfloat16)}
DTYPES["long"] = (jnp.bfloat16, jnp.float32)


def average(params: Any, ema: Any, count: Any) -> Any:
    del count
    return optax.incremental_update(params, ema, 0.003)


def warming_average(params: Any, ema: Any, count: Any) -> Any:
    decay = jnp.minimum(0.99, (1.0 + count) / (10.0 + count))
    return optax.incremental_update(params, ema, 1 - decay)


def debiased_average(params: Any, ema: Any, count: Any) -> Any:
    return jax.tree.map(lambda p, e: e + (p - e) / (1.0 - 0.99**count), params, ema)


def hard_copy(params: Any, target: Any, count: Any) -> Any:
    same = jax.tree.map(lambda p, t: p.astype(t.dtype), params, target)
    return optax.periodic_update(same, target, count, 3)


def copy_each_step(params: Any, target: Any, count: Any) -> Any:
    del target, count
    return params


FUNCTIONS = [
    {"fast": warming_average, "slow": average, "target": hard_copy},
    {"debiased": debiased_average, "target_params": copy_each_step},
    {"target": hard_copy},
]


def loss_of(params: Any, data: Any) -> jax.Array:
    x, y = data
    return jnp.mean((support.forward(params, x) - y) ** 2)


def cast(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, dtype), params)


def dict_program(
    mesh: jax.sharding.Mesh,
    derived: dict[str, Callable[..., Any]],
    dtypes: tuple[Any, Any] = DTYPES["float32"],
    tx: optax.GradientTransformation | None = None,
    wrapped: Callable[[Any], Any] = lambda tx: tx,
) -> Program:
    """A state as haiku's users keep it, with a tree for each derived function."""
    recorder = adacheck.Recorder(tx or optax.adamw(1e-2), derived=derived)
    chain = wrapped(optax.chain(optax.clip_by_global_norm(1.0), recorder))

    def begin() -> Any:
        params = cast(support.initial_params(), dtypes[0])
        state = {"params": params, "opt_state": chain.init(params)}
        return support.place(state | {name: cast(params, dtypes[1]) for name in derived}, mesh)

    def train_step(state: Any, data: Any) -> Any:
        grads = jax.grad(loss_of)(state["params"], data)
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state}
        for name in derived:
            after[name] = recorder.derive(name, opt_state, params, state[name])
        return after

    return Program.of(recorder, begin, train_step)


class EmaState(TrainState):
    ema_params: Any = None


def linen_program(mesh: jax.sharding.Mesh) -> Program:
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"ema_params": average})
    chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)

    def begin() -> EmaState:
        params = support.initial_params()
        ema = jax.tree.map(jnp.copy, params)
        return support.place(
            EmaState.create(apply_fn=support.forward, params=params, tx=chain, ema_params=ema), mesh
        )

    def train_step(state: EmaState, data: Any) -> EmaState:
        state = state.apply_gradients(grads=jax.grad(loss_of)(state.params, data))
        ema = recorder.derive("ema_params", state.opt_state, state.params, state.ema_params)
        return state.replace(ema_params=ema)

    return Program.of(recorder, begin, train_step)


def nnx_program(mesh: jax.sharding.Mesh) -> Program:
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"ema": average})
    model = support._Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, recorder, wrt=nnx.Param)
    graph, first = nnx.split({"ema": nnx.clone(model), "model": model, "optimizer": optimizer})

    def begin() -> Any:
        return support.place(jax.tree.map(jnp.copy, first), mesh)

    def train_step(state: Any, data: Any) -> Any:
        nodes = nnx.merge(graph, state)
        model, ema, optimizer = nodes["model"], nodes["ema"], nodes["optimizer"]
        grads = nnx.grad(lambda m: jnp.mean((m(data[0]) - data[1]) ** 2))(model)
        optimizer.update(model, grads)
        params, old = nnx.state(model, nnx.Param), nnx.state(ema, nnx.Param)
        nnx.update(ema, recorder.derive("ema", optimizer.opt_state, params, old))
        return nnx.state(nodes)

    return Program.of(recorder, begin, train_step)


class ParamsEma(NamedTuple):
    ema: Any


def params_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """An average of the params as part of the optimizer, as optax users write it."""

    def init(params: Any) -> Any:
        return tx.init(params), ParamsEma(jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, inner = tx.update(updates, state[0], params)
        new = optax.apply_updates(params, updates)
        return updates, (inner, ParamsEma(optax.incremental_update(new, state[1].ema, 1 - decay)))

    return optax.GradientTransformation(init, update)


def assert_derived_is_replayed(
    root: Any, run: Run, steps: int = 5, names: tuple[str, ...] = (), where: Any = OTHERS
) -> None:
    """Saves some steps, and restores them without the recorder's code on several meshes."""
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder, max_deltas=9)) as manager:
        saved = save_steps(manager, run, steps)
    assert kinds(root) == "B" + "R" * (steps - 1)
    # What an nnx model has besides its params is stored wherever it changed.
    assert_only_changes_are_stored(root, saved)
    update, leaves = base_of(root, 1).update, base_of(root, 1).leaves
    assert update is not None
    for name in names:
        own = {i for i, leaf in enumerate(leaves) if f"/{leaf.path}/".find(f"/{name}/") >= 0}
        assert own
        assert own & {*update.inner}
    for step in range(2, steps + 1):
        assert delta_of(root, step).checked == "full"
        assert delta_of(root, step).unreplayed == ()
    assert_restores(root, saved, run.state, where)


def assert_restores(root: Any, saved: Any, state: Any, meshes: Any = OTHERS) -> None:
    """Restores the newest steps, one on each mesh."""
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        for step, shape in zip([*saved][::-1], meshes, strict=False):
            target = support.abstract(state, mesh_of(shape))
            restored = manager.restore(step, args=adacheck.RestoreArgs(target, require_exact=True))
            assert_same_bits(restored, saved[step])


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(each, marks=() if each.startswith("4x2") else pytest.mark.campaign)
        for each in MESHES
    ],
)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("derived", FUNCTIONS, ids="-".join)
def test_derived_trees_are_replayed_on_every_mesh(tmp_path, derived, dtypes, mesh):
    program = dict_program(MESHES[mesh](), derived, DTYPES[dtypes])
    assert_derived_is_replayed(tmp_path, program.run(), names=(*derived,))


def subset_average(params: Any, ema: Any, count: Any) -> Any:
    del count
    return optax.incremental_update({"in": params["in"]}, ema, 0.01)


def subset_program(mesh: jax.sharding.Mesh) -> Program:
    """An average of some of the params."""
    recorder = adacheck.Recorder(optax.adamw(1e-2), derived={"ema": subset_average})

    def begin() -> Any:
        params = support.initial_params()
        ema = {"in": jax.tree.map(jnp.copy, params["in"])}
        return support.place({"params": params, "opt": recorder.init(params), "ema": ema}, mesh)

    def train_step(state: Any, data: Any) -> Any:
        grads = jax.grad(loss_of)(state["params"], data)
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = recorder.derive("ema", opt, params, state["ema"])
        return {"params": params, "opt": opt, "ema": ema}

    return Program.of(recorder, begin, train_step)


def inside(tx: optax.GradientTransformation) -> Callable[[jax.sharding.Mesh], Program]:
    """A program whose average is part of the optimizer, and is not declared."""
    return lambda mesh: dict_program(mesh, {}, tx=tx)


@pytest.mark.first(0, slow=4)
@pytest.mark.parametrize(
    ("program", "names"),
    [
        (linen_program, ("ema_params",)),
        (nnx_program, ("ema",)),
        (subset_program, ("ema",)),
        (inside(params_ema(optax.adamw(1e-2), 0.99)), ()),
        (inside(optax.chain(optax.ema(0.9), optax.sgd(0.1))), ()),
    ],
    ids=["field of a train state", "nnx model", "some params", "inside", "of gradients"],
)
def test_averages_of_every_form_are_replayed(tmp_path, program, names):
    where = [(2, 4)] if program is nnx_program else OTHERS
    assert_derived_is_replayed(tmp_path, program(mesh_of((4, 2))).run(), names=names, where=where)


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False], ids=["the same function", "another one"])
def test_a_resumed_run_goes_on_with_deltas_of_the_same_function(tmp_path, is_same):
    """The first save after a restore comes before the train step was traced."""
    saved = {}
    for function in (average, average if is_same else warming_average):
        run = dict_program(mesh_of((4, 2)), {"ema": function}).run()
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=9)) as manager:
            if (newest := manager.latest_step()) is not None:
                target = adacheck.RestoreArgs(support.abstract(run.state))
                run.state, run.count = manager.restore(newest, args=target), newest
            saved |= save_steps(manager, run, 3)
    assert kinds(tmp_path) == ("BRRRRR" if is_same else "BRRBRR")
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.slow
def test_a_base_made_in_the_background_has_the_derived_trees(tmp_path, monkeypatch):
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))
    run = dict_program(mesh_of((4, 2)), {"ema": average}).run()
    policy = adacheck.AdaptivePolicy(most_deltas=3)
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=policy)
    saved = trained(tmp_path, run, handler, 9)
    assert bases_of(tmp_path) == [1, 4, 7]
    assert_all_restorable(tmp_path, saved, run.state)


def stepped(run: Run, changed: Callable[[int, Any, Any], Any]) -> Any:
    """One train step whose state is changed by hand afterwards."""
    before = jax.tree.map(jnp.copy, run.state)
    run.advance()
    run.state = jax.block_until_ready(changed(run.count, before, run.state))
    return host_copy(run.state)


def skipped(step: int, before: Any, state: Any) -> Any:
    return state if step % 3 == 0 else {**state, "ema": before["ema"]}


def edited(step: int, before: Any, state: Any) -> Any:
    del before
    return {**state, "ema": jax.tree.map(jnp.copy, state["params"])} if step == 4 else state


def other_decay(step: int, before: Any, state: Any) -> Any:
    if step < 4:
        return state
    return {**state, "ema": optax.incremental_update(state["params"], before["ema"], 0.1)}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "runs ahead"])
@pytest.mark.parametrize("check", ["auto", "sample", "full"])
@pytest.mark.parametrize("changed", [skipped, edited, other_decay])
def test_what_is_computed_otherwise_is_stored_and_nothing_is_lost(
    tmp_path, caplog, monkeypatch, changed, check, waits
):
    """Also where the state is gone when this is found."""
    if not waits:
        monkeypatch.setattr(transfer, "are_ready", lambda _: False)
    run = dict_program(mesh_of((4, 2)), {"ema": average}).run()
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=9, shadow=support.SHADOWS[check])
    saved = {}
    with manager_of(tmp_path, handler) as manager:
        for _ in range(9):
            expected = stepped(run, changed)
            saved[run.count] = expected
            manager.save(run.count, args=adacheck.SaveArgs(run.state))
    assert kinds(tmp_path) == "B" + "R" * 8
    assert "They are stored as they are, and the other leaves are replayed" in caplog.text
    is_changed = {skipped: lambda n: n % 3, edited: lambda n: n == 4, other_decay: lambda n: n >= 4}
    leaves = base_of(tmp_path, 1).leaves
    for step in range(2, 10):
        delta = delta_of(tmp_path, step)
        assert delta.checked == ("full" if check == "auto" else check)
        assert all(path.startswith(("ema/", "opt_state/")) for path in stored_paths(tmp_path, step))
        if check == "full" and not waits and step == 5:
            continue  # the copy on the devices has what replay made of the step before
        assert {leaves[i].path[:4] for i in delta.unreplayed} == (
            {"ema/"} if is_changed[changed](step) else set()
        )
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.slow
def test_an_edit_of_a_recorded_step_is_stored_too(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(transfer, "are_ready", lambda _: False)
    run = dict_program(mesh_of((4, 2)), {"ema": average}).run()
    handler, saved = adacheck.AdaCheckHandler(run.recorder), {}
    with manager_of(tmp_path, handler) as manager:
        saved |= save_steps(manager, run, 2)
        for _ in range(3):
            expected = stepped(run, edited)
            saved[run.count] = expected
            assert handler.record_step(run.state, run.count)
        saved |= save_steps(manager, run, 1)
    assert [each.checked for each in delta_of(tmp_path, 6).deltas] == ["full"] * 4
    assert [bool(each.unreplayed) for each in delta_of(tmp_path, 6).deltas] == [0, 1, 0, 0]
    assert "They are stored as they are, and the other leaves are replayed" in caplog.text
    assert_all_restorable(tmp_path, saved, run.state)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("waits", [False, True], ids=["runs ahead", "waits"])
def test_micro_steps_behind_recorded_ones_are_stored_too(tmp_path, monkeypatch, waits):
    if not waits:
        monkeypatch.setattr(transfer, "are_ready", lambda _: False)
    wrapped = lambda tx: optax.MultiSteps(tx, 3)  # noqa: E731
    run = dict_program(mesh_of((4, 2)), {"ema": average}, wrapped=wrapped).run()
    handler = adacheck.AdaCheckHandler(run.recorder, max_deltas=19, params_path="params")
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 1)
        for _ in range(3):
            for _ in range(2):
                run.advance()
                saved[run.count] = host_copy(run.state)
                assert handler.record_step(run.state, run.count)
            saved |= save_steps(manager, run, 2)
    assert sorted(manager.all_steps()) == [1, 4, 5, 8, 9, 12, 13]
    assert "N" in kinds(tmp_path)
    assert_all_restorable(tmp_path, saved, run.state)


def test_a_tree_that_is_not_in_the_state_is_told(tmp_path, caplog):
    run = dict_program(mesh_of((1, 1)), {"ema": average}).run()
    with (
        caplog.at_level(logging.WARNING),
        manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager,
    ):
        rest = {name: tree for name, tree in run.advance().items() if name != "ema"}
        manager.save(1, args=adacheck.SaveArgs(rest))
    assert "has a derived tree 'ema', but the saved state has no such leaf path" in caplog.text


@pytest.mark.slow
def test_an_update_that_adds_up_elements_stores_the_tree(tmp_path):
    run = dict_program(mesh_of((1, 1)), {"ema": average}, tx=optax.adafactor(1e-2)).run()
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=9)) as manager:
        saved = save_steps(manager, run, 3)
    assert_restores(tmp_path, saved, run.state)


@pytest.mark.slow
def test_a_large_average_that_was_left_out_is_stored_once_the_state_is_donated(tmp_path):
    """It is found behind the save, which copied it, though it views other leaves of that size."""
    recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9), derived={"ema": average})
    params = {"w": jnp.ones((512, 256))}
    state = {"params": params, "opt_state": recorder.init(params), "ema": cast(params, jnp.float32)}

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
    def trained(state: Any, is_left_out: bool) -> Any:
        grads = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params, ema = optax.apply_updates(state["params"], updates), state["ema"]
        if not is_left_out:
            ema = recorder.derive("ema", opt_state, params, ema)
        return {"params": params, "opt_state": opt_state, "ema": ema}

    saved = {}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        for number in range(5):
            state = jax.block_until_ready(trained(state, number == 3))
            support.wait_for_compilers()
            saved[number] = host_copy(state)
            manager.save(number, args=adacheck.SaveArgs(state))
            for _ in range(3):  # over the memory of what was saved
                state = trained(state, False)
            jax.block_until_ready(state)
            leaves = map(jnp.asarray, saved[number])
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
            manager.wait_until_finished()
    assert kinds(tmp_path) == "BRRRR"
    assert stored_paths(tmp_path, 3) >= {"ema/w"}
    assert_restores(tmp_path, saved, state)
