"""A run that is resumed on other devices goes on with deltas, cut as its state lies there."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest, Leaf
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.steps import lookup, roots
from adacheck_jax.tools import audit, inspection
from adacheck_jax.tools.handover import copying
from adacheck_jax.tools.report.gather import tally_of
from adacheck_jax.tools.steps import RecordedSteps
from tests import support
from tests.save.loop import assert_all_restorable, deltas_of, kinds
from tests.support import (
    Program,
    Run,
    abstract,
    host_copy,
    manager_of,
    mesh_of,
    place,
)
from tests.update.test_separate import REDUCING, separate_run


def adafactor() -> optax.GradientTransformation:
    """An update with means and a norm inside, some of them of whole leaves."""
    scaled = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    return optax.chain(optax.clip_by_global_norm(0.5), scaled)


def frozen() -> optax.GradientTransformation:
    """An update that passes a matrix through."""
    labels = {"in": "trained", "out": "frozen", "scale": "trained"}
    return optax.multi_transform(
        {"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels
    )


OPTIMIZERS = {"adamw": lambda: optax.adamw(1e-2), "adafactor": adafactor, "frozen": frozen}


@functools.cache
def program(mesh: jax.sharding.Mesh, name: str) -> Program:
    """A train step with leaves beside the update: tied to a param, constant, and a key."""
    recorder, chain = support.recorded(OPTIMIZERS[name]())

    def begin() -> Any:
        params = support.initial_params()
        state = {"params": params, "opt_state": chain.init(params), "step": jnp.int32(0)}
        state |= {"tied": jnp.array(params["in"]["kernel"]), "fixed": jnp.ones((64, 128))}
        return place(state | {"key": jax.random.key_data(jax.random.key(3))}, mesh)

    def train_step(state: Any, data: Any) -> Any:
        x, y = data
        grads = jax.grad(lambda p: jnp.mean((support.forward(p, x) - y) ** 2))(state["params"])
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        rest = {"tied": params["in"]["kernel"] + 0.0, "fixed": state["fixed"]}
        rest |= {"key": state["key"] + jnp.uint32(1), "step": state["step"] + 1}
        return {"params": params, "opt_state": opt_state, **rest}

    return Program.of(recorder, begin, train_step)


def resumed(root: Any, run: Run, steps: int, *, record: int = 0, **options: Any) -> dict[int, Any]:
    """Restores the newest step onto a run's devices, if there is one, and saves the next ones.

    Of these the first are recorded and not saved.
    """
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    saved = {}
    with manager_of(root, handler) as manager:
        if (newest := manager.latest_step()) is not None:
            run.state = manager.restore(newest, args=adacheck.RestoreArgs(abstract(run.state)))
            run.count = newest
        for number in range(steps):
            run.advance()
            saved[run.count] = host_copy(run.state)
            if number < record:
                assert handler.record_step(run.state, run.count)
            else:
                manager.save(run.count, args=adacheck.SaveArgs(run.state))
                manager.wait_until_finished()
    return saved


def trained(root: Any, shapes: Any, name: str = "adamw", **options: Any) -> dict[int, Any]:
    """Saves three steps on each mesh, one after another."""
    saved = {}
    for shape in shapes:
        saved |= resumed(root, program(mesh_of(shape), name).run(), 3, **options)
    return saved


def assert_whole(root: Any, saved: Any, shapes: Any, name: str = "adamw") -> None:
    """Every step has its bits on every mesh, and on the tools' one device."""
    for shape in shapes:
        assert_all_restorable(root, saved, program(mesh_of(shape), name).begin())
    report = audit.verify_root(root, read_data=True, replay=True)
    assert (report.damaged_count, report.not_looked_at) == (0, ())
    assert all("replay" in row.checked and not row.rounded for row in report.steps)


def recut(root: Any) -> list[int]:
    """The steps whose manifests tell of boxes, since those are others than the parent's."""
    return [x.step for x in roots.steps_of(root) if getattr(x.manifest, "grids", ())]


WAYS = [
    ((8,), (4,), (8,)),
    ((2, 4), (4, 2), (2, 4)),
    ((8,), (1,), (8,)),
    ((1,), (4, 2), (2, 2)),
]
CHOSEN = [("adafactor", WAYS[1]), ("frozen", WAYS[2])]


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize(
    ("name", "shapes"),
    sorted(itertools.product(OPTIMIZERS, WAYS), key=lambda row: row not in CHOSEN),
    ids=str,
)
def test_every_step_after_a_restart_is_a_delta_and_restores_on_every_mesh(tmp_path, shapes, name):
    saved = trained(tmp_path, shapes, name)
    assert "".join(kinds(tmp_path)) == "BRRRRRRRR"
    assert {each.checked for each in deltas_of(tmp_path).values()} == {"full"}
    assert recut(tmp_path) == [4, 7]  # those behind are cut as these are
    assert_whole(tmp_path, saved, {*shapes, (2, 2)}, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "then"),
    [
        ({"shadow": support.SHADOWS["sample"]}, "RRR"),
        ({"shadow": support.SHADOWS["full"]}, "RRR"),
        ({"delta": "bits"}, "DDD"),
    ],
    ids=["sample", "full", "bits"],
)
def test_without_a_shadow_in_host_memory_too(tmp_path, options, then):
    saved = trained(tmp_path, [(8,), (2, 2), (1,)], **options)
    assert "".join(kinds(tmp_path)) == "B" + then[1:] + 2 * then
    assert_whole(tmp_path, saved, [(8,), (2, 2)])


@pytest.mark.slow
def test_steps_are_recorded_behind_a_restart(tmp_path):
    saved = resumed(tmp_path, program(mesh_of((2, 4)), "adamw").run(), 3)
    saved |= resumed(tmp_path, program(mesh_of((4, 2)), "adamw").run(), 4, record=2)
    assert [each.step for each in roots.steps_of(tmp_path)] == [1, 2, 3, 6, 7]
    assert recut(tmp_path) == [6]
    assert_whole(tmp_path, saved, [(2, 4), (4, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("has_shadow", [True, False])
def test_a_run_goes_back_and_forth_in_one_process(tmp_path, has_shadow):
    """What was planned for the boxes of one mesh is not taken for those of another."""
    first, other = (program(mesh_of(shape), "adamw") for shape in ((4, 2), (2, 2)))
    run, saved = first.run(), {}
    options = {} if has_shadow else {"shadow": None}
    handler = adacheck.AdaCheckHandler(run.recorder, **options)
    with manager_of(tmp_path, handler) as manager:
        saved |= support.save_steps(manager, run, 3)
        for moved in (Run(run.recorder, other.begin(), other.train_step), first.run()):
            newest = manager.latest_step()
            moved.state = manager.restore(newest, args=adacheck.RestoreArgs(abstract(moved.state)))
            moved.count = newest
            saved |= support.save_steps(manager, moved, 3)
    found = "".join(kinds(tmp_path))
    # Not in the course of training: the shadow stays where it is, and the save is a base.
    assert found == "BRRRRRRRR" if not has_shadow else "B" in found[1:]
    assert_whole(tmp_path, saved, [(4, 2), (2, 2)])


def inspected(root: Any, step: int) -> int:
    """The bytes of a state."""
    return sum(each.leaf_bytes for each in inspection.describe_step(root, step).leaves)


def _leaf(root: Any, step: int, path: str) -> Leaf:
    """A leaf, in the boxes that a step has it in."""
    leaves = lookup.resolve(root / str(step) / "default").leaves
    return next(each for each in leaves if each.path == path)


@pytest.mark.slow
def test_steps_of_several_meshes_are_compacted_compared_and_copied(tmp_path):
    root = tmp_path / "run"
    saved = trained(root, [(2, 4), (4, 2)])
    assert {len(_leaf(root, n, "fixed").owners) for n in range(1, 7)} == {8}
    assert _leaf(root, 3, "fixed").cuts != _leaf(root, 4, "fixed").cuts
    found = tally_of(step.lineage for step in RecordedSteps(root).steps.values())
    assert sum(found.values()) == 6 * inspected(root, 6)
    copying.copy(root, tmp_path / "copy")
    for number in (5, 2):
        support.compact(root, number)
        base = lookup.resolve(root / str(number) / "default").base
        assert isinstance(base, BaseManifest)
        assert base.step == number
        assert_whole(root, saved, [(2, 4), (4, 2)])
    saved |= resumed(root, program(mesh_of((4, 2)), "adamw").run(), 2)
    assert recut(root) == [4]  # and the base in the place of step 5 is cut as that was
    assert "".join(kinds(root)) == "BBRRBRRR"
    assert_whole(root, saved, [(2, 4), (4, 2)])
    assert_whole(tmp_path / "copy", {n: saved[n] for n in range(1, 7)}, [(2, 4), (4, 2)])


@pytest.mark.slow
def test_a_lineage_of_two_meshes_ends_with_a_base_of_the_loop(tmp_path, monkeypatch):
    """A base in the background is cut and described as the one before it."""
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))
    policy = adacheck.AdaptivePolicy(most_deltas=4)
    saved = resumed(tmp_path, program(mesh_of((2, 4)), "adamw").run(), 2, max_deltas=policy)
    saved |= resumed(tmp_path, program(mesh_of((4, 2)), "adamw").run(), 6, max_deltas=policy)
    bases = [x.manifest for x in roots.steps_of(tmp_path) if isinstance(x.manifest, BaseManifest)]
    assert [each.step for each in bases] == [1, 5]  # and none in the place of step 4
    assert "full" in bases[1].reason
    assert_whole(tmp_path, saved, [(2, 4), (4, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "shapes", "expected"),
    [
        (optax.adamw(1e-2), [(4, 2), (2, 2)], "BRRR"),
        # Sums that are too many to be recorded: exact on the mesh of the base alone.
        (REDUCING["muon"], [(4, 2), (4, 2), (2, 2), (2, 2)], "BRRRBRRR"),
    ],
    ids=["adamw", "muon"],
)
def test_an_update_of_its_own_program_goes_on_where_it_is_exact(tmp_path, tx, shapes, expected):
    saved = {}
    for shape in shapes:
        run = separate_run(mesh_of(shape), tx)
        run.advance()  # its state lies where its update leaves it
        saved |= resumed(tmp_path, run, 2)
    assert "".join(kinds(tmp_path)) == expected
    is_exact = expected == "BRRR"
    assert bool(recut(tmp_path)) == is_exact
    if is_exact:
        assert {each.checked for each in deltas_of(tmp_path).values()} == {"identity"}
    for shape in {*shapes, *([(1, 1)] if is_exact else [])}:
        assert_all_restorable(tmp_path, saved, separate_run(mesh_of(shape), tx).advance())


DTYPES = ("bool", "int4", "uint8", "bfloat16", "float8_e5m2", "int64", "float64", "complex128")


def begun_eagerly(mesh: jax.sharding.Mesh | None) -> Run:
    """Params on a mesh, and beside them what a loop makes without saying where it has to be."""
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"w": jnp.arange(8.0)}
    if mesh is not None:
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("data")))
    kinds = {name: jnp.asarray(np.arange(4).astype(jnp.dtype(name))) for name in DTYPES}
    state = {"params": params, "opt": recorder.init(params), "step": jnp.int32(0)}
    state |= {"kinds": kinds, "key": jax.random.key(3), "host": np.ones(2)}

    @jax.jit
    def train_step(state: Any, data: Any) -> Any:
        grads = {"w": state["params"]["w"] + data[0][0, 0]}
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.wrap_key_data(jax.random.key_data(state["key"]) + jnp.uint32(1))
        return state | {"params": params, "opt": opt, "step": state["step"] + 1, "key": key}

    return Run(recorder, state, train_step)


def are_committed(state: Any) -> list[bool | None]:
    return [getattr(leaf, "committed", None) for leaf in jax.tree.leaves(state)]


def restored_eagerly(root: Any, way: str, mesh: jax.sharding.Mesh | None, **options: Any) -> Run:
    """Restores the newest step like the state that a new run begins with, and goes on one step."""
    run = begun_eagerly(mesh)
    with adacheck.checkpoint_manager(root, run.recorder, **options) as manager:
        newest, wanted, state = manager.latest_step(), run.state, None
        args = adacheck.RestoreArgs(wanted)
        if way.startswith("memory"):
            newest, state = manager.restore_newest(wanted)
            assert manager.handler.restored.source == "memory"
        elif way == "stock arguments":
            restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
            args = adacheck.RestoreArgs(item=wanted, restore_args=restore_args)
        elif way == "v1":
            with adacheck.v1.checkpointer(root, run.recorder) as checkpointer:
                found = checkpointer.load_checkpointables(newest, {"default": wanted})
                state = found["default"]
        run.state = manager.restore(newest, args=args) if state is None else state
        assert are_committed(run.state) == are_committed(wanted)
        run.count = newest
        run.advance()
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
    return run


WAYS_BACK = ["base", "delta", "memory", "memory of records", "stock arguments", "v1", "stock step"]


@pytest.mark.covering(1, quick=3)
@pytest.mark.parametrize("on_mesh", [True, False], ids=["mesh", "device"])
@pytest.mark.parametrize("way", WAYS_BACK)
@jax.enable_x64(True)
def test_what_was_committed_to_no_device_comes_back_so(tmp_path, way, on_mesh):
    """The train step takes a restored state as it took the one that this was to be like."""
    mesh, root = mesh_of((4,)) if on_mesh else None, tmp_path / "root"
    run, options = begun_eagerly(mesh), {"max_to_keep": None}
    assert run.state["step"].committed is False
    if way.startswith("memory"):
        records = way == "memory of records" or None
        options["shadow"] = adacheck.Shadow(directory=tmp_path / "memory", records=records)
    if way == "stock step":
        run.advance()
        with ocp.CheckpointManager(root) as manager:
            manager.save(1, args=ocp.args.StandardSave(run.state))
    else:
        with adacheck.checkpoint_manager(root, run.recorder, **options) as manager:
            support.save_steps(manager, run, 1 if way == "base" else 3)
    again = restored_eagerly(root, way, mesh, **options)
    run.advance()
    support.assert_same_bits(again.state, host_copy(run.state))
    if way not in ("v1", "stock step"):  # the first of which is another handler's
        assert "".join(kinds(root)) == "B" + "R" * (run.count - 1)
