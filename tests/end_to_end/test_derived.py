"""Moving averages and target networks beside the optimizer cost a delta nothing, to the bit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import adacheck_jax as adacheck
from tests import support
from tests.end_to_end.kept import assert_only_changes_are_stored, base_of, delta_of, kinds
from tests.save.loop import Loop, computing
from tests.support import Program, mesh_of

TOLD = "They are stored as they are, and the other leaves are replayed"
MESHES = {
    "4x2": lambda: mesh_of((4, 2)),
    "4x2 explicit": lambda: mesh_of((4, 2), AxisType.Explicit),
    "one device": lambda: mesh_of((1, 1)),
}
DTYPES = {
    "float32": (jnp.float32, jnp.float32),
    "short": (jnp.float32, jnp.bfloat16),
    "long": (jnp.bfloat16, jnp.float32),
}


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


def of_a_part(params: Any, ema: Any, count: Any) -> Any:
    del count
    return optax.incremental_update({"in": params["in"]}, ema, 0.01)


FUNCTIONS = [
    {"fast": warming_average, "slow": average, "target": hard_copy},
    {"debiased": debiased_average, "target_params": copy_each_step},
    {"target": hard_copy},
]


def dict_program(
    mesh: jax.sharding.Mesh,
    derived: dict[str, Callable[..., Any]],
    dtypes: tuple[Any, Any] = DTYPES["float32"],
    tx: optax.GradientTransformation | None = None,
    wrapped: Callable[[Any], Any] = lambda tx: tx,
) -> Program:
    """A state as haiku's users keep it, with a tree for each derived function."""
    recorder = adacheck.Recorder(tx or optax.adamw(1e-2), derived=derived)
    first, other = (
        jax.tree.map(lambda x, d=dtype: x.astype(d), support.initial_params()) for dtype in dtypes
    )
    trees = {name: {"in": other["in"]} if x is of_a_part else other for name, x in derived.items()}

    def follow(before: Any, after: Any) -> Any:
        now = after["opt_state"], after["params"]
        return {name: recorder.derive(name, *now, before[name]) for name in derived}

    chain = wrapped(optax.chain(optax.clip_by_global_norm(1.0), recorder))
    return support.program_of(mesh, recorder, chain, params=first, more=trees, follow=follow)


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


def params_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """An average of the params as part of the optimizer, as optax users write it."""

    def init(params: Any) -> Any:
        return tx.init(params), jax.tree.map(jnp.copy, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, inner = tx.update(updates, state[0], params)
        new = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(new, state[1], 1 - decay))

    return optax.GradientTransformation(init, update)


def assert_replayed(root: Any, program: Program, names: Any, *others: tuple[int, ...]) -> None:
    """Saves some steps, and restores them without the recorder's code on several meshes."""
    with Loop(root, program.run(), max_deltas=9) as loop:
        loop.save(5)
    assert kinds(root) == "BRRRR"
    # What an nnx model has besides its params is stored wherever it changed.
    assert_only_changes_are_stored(root, loop.states)
    base = base_of(root, 1)
    for name in names:
        own = {i for i, leaf in enumerate(base.leaves) if f"/{name}/" in f"/{leaf.path}/"}
        assert own & {*base.update.inner}
    assert {(each.checked, each.unreplayed) for each in loop.deltas.values()} == {("full", ())}
    for shape in others:
        loop.verify(mesh_of(shape))


PROGRAMS = [
    *(
        pytest.param(dict_program, (derived, dtypes), mesh, id=f"{'-'.join(derived)} {name} {mesh}")
        for derived, (name, dtypes), mesh in zip(FUNCTIONS, DTYPES.items(), MESHES, strict=False)
    ),
    pytest.param(nnx_program, (), "4x2", id="nnx model"),
    pytest.param(dict_program, ({"ema": of_a_part},), "4x2", id="some params"),
    pytest.param(
        dict_program,
        ({}, DTYPES["float32"], params_ema(optax.adamw(1e-2), 0.99)),
        "4x2 explicit",
        id="inside",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "given", "mesh"), PROGRAMS)
def test_averages_of_every_form_are_replayed_on_every_mesh(tmp_path, program, given, mesh):
    """Those inside of the optimizer need no declaration; ``tests/update`` has all types."""
    names = given[0] if given else ("ema",)
    others = [(2, 4)] if program is nnx_program else [(1, 1), (8, 1)]
    assert_replayed(tmp_path, program(MESHES[mesh](), *given), names, *others)


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False], ids=["the same function", "another one"])
def test_a_resumed_run_goes_on_with_deltas_of_the_same_function(tmp_path, is_same):
    """The first save after a restore comes before the train step was traced."""
    first, then = (
        dict_program(mesh_of((4, 2)), {"ema": function}).run()
        for function in (average, average if is_same else warming_average)
    )
    with Loop(tmp_path, first, max_deltas=9) as loop:
        loop.save(3)
        then.count, loop.run = 3, then
        loop.reopen()
        loop.save(3)
    assert loop.check() == ("BRRRRR" if is_same else "BRRBRR")


def skipped(step: int, before: Any, state: Any) -> Any:
    return state if step % 3 == 0 else {**state, "ema": before["ema"]}


def edited(step: int, before: Any, state: Any) -> Any:
    del before
    return {**state, "ema": jax.tree.map(jnp.copy, state["params"])} if step == 4 else state


def other_decay(step: int, before: Any, state: Any) -> Any:
    if step < 4:
        return state
    return {**state, "ema": optax.incremental_update(state["params"], before["ema"], 0.1)}


CHANGED = {skipped: lambda n: n % 3, edited: lambda n: n == 4, other_decay: lambda n: n >= 4}
"""What is done to a state by hand, and in which steps."""


def changing_loop(root: Any, changed: Callable[[int, Any, Any], Any], **options: Any) -> Loop:
    """A loop whose state is changed by hand after each train step."""
    run = dict_program(mesh_of((4, 2)), {"ema": average}).run()
    train_step = run.train_step

    def stepped(state: Any, data: Any) -> Any:
        before = jax.tree.map(jnp.copy, state)
        return jax.block_until_ready(changed(run.count + 1, before, train_step(state, data)))

    run.train_step = stepped
    return Loop(root, run, **options)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "runs ahead"])
@pytest.mark.parametrize("check", ["auto", "sample", "full"])
@pytest.mark.parametrize("changed", CHANGED)
def test_what_is_computed_otherwise_is_stored_and_nothing_is_lost(
    tmp_path, caplog, changed, check, waits
):
    """Also where the state is gone when this is found."""
    options = {"max_deltas": 9, "shadow": support.SHADOWS[check]}
    with computing(not waits), changing_loop(tmp_path, changed, **options) as loop:
        for _ in range(9):
            loop.train()
            loop.put()
    assert TOLD in caplog.text
    for step in range(2, 10):
        assert delta_of(tmp_path, step).checked == ("full" if check == "auto" else check)
        assert all(path.startswith("ema/") for path in loop.stored(step))
        if check == "full" and not waits and step == 5:
            continue  # the copy on the devices has what replay made of the step before
        expected = {"ema/"} if CHANGED[changed](step) else set()
        assert {path[:4] for path in loop.unreplayed(step)} == expected
    assert loop.check() == "BRRRRRRRR"


@pytest.mark.slow
def test_an_edit_of_a_recorded_step_is_stored_too(tmp_path, caplog):
    with computing(), changing_loop(tmp_path, edited) as loop:
        loop.save(2)
        assert loop.keep(3) == "rrr"
        loop.save()
    assert {each.checked for each in loop.deltas.values()} == {"full"}
    assert [n for n, each in loop.deltas.items() if each.unreplayed] == [4]
    assert TOLD in caplog.text
    assert loop.check() == "BRR"


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("waits", [False, True], ids=["runs ahead", "waits"])
def test_micro_steps_behind_recorded_ones_are_stored_too(tmp_path, waits):
    accumulating = lambda tx: optax.MultiSteps(tx, 3)  # noqa: E731
    run = dict_program(mesh_of((4, 2)), {"ema": average}, wrapped=accumulating).run()
    with computing(not waits), Loop(tmp_path, run, max_deltas=19, params_path="params") as loop:
        loop.save()
        for _ in range(3):
            assert loop.keep(2) == "rr"
            loop.save(2)
    assert "N" in kinds(tmp_path)
    loop.check()


def test_a_tree_that_is_not_in_the_state_is_told(tmp_path, caplog):
    run = dict_program(mesh_of((1, 1)), {"ema": average}).run()
    with caplog.at_level(logging.WARNING), Loop(tmp_path, run) as loop:
        rest = {name: tree for name, tree in loop.train().items() if name != "ema"}
        loop.manager.save(1, args=adacheck.SaveArgs(rest))
    assert "has a derived tree 'ema', but the saved state has no such leaf path" in caplog.text


@pytest.mark.slow
def test_an_update_that_adds_up_elements_stores_the_tree(tmp_path):
    program = dict_program(mesh_of((1, 1)), {"ema": average}, tx=optax.adafactor(1e-2))
    with Loop(tmp_path, program.run(), max_deltas=9) as loop:
        loop.save(3)
    loop.check()


@pytest.mark.slow
def test_a_large_average_that_was_left_out_is_stored_once_the_state_is_donated(tmp_path):
    """It is found behind the save, which copied it, though it views other leaves of that size."""
    recorder = adacheck.Recorder(optax.sgd(0.1, momentum=0.9), derived={"ema": average})
    params = {"w": jnp.ones((512, 256))}
    first = {"params": params, "opt_state": recorder.init(params), "ema": {"w": params["w"] + 0}}

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
    def trained(state: Any, is_left_out: bool) -> Any:
        grads = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params, ema = optax.apply_updates(state["params"], updates), state["ema"]
        if not is_left_out:
            ema = recorder.derive("ema", opt_state, params, ema)
        return {"params": params, "opt_state": opt_state, "ema": ema}

    run = support.Run(recorder, first, lambda state, _: trained(state, run.count == 3))
    with Loop(tmp_path, run) as loop:
        for _ in range(5):
            jax.block_until_ready(loop.train())
            support.wait_for_compilers()
            loop.put()
            for _ in range(3):  # over the memory of what was saved
                run.state = trained(run.state, False)
            jax.block_until_ready(run.state)
            leaves = map(jnp.asarray, loop.states[loop.number])
            run.state = jax.tree.unflatten(jax.tree.structure(run.state), leaves)
            loop.manager.wait_until_finished()
    assert loop.stored(4) >= {"ema/w"}
    assert loop.check() == "BRRRR"
