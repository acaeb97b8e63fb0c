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
from tests.save.loop import Loop, assert_all_restorable, holders, kinds
from tests.support import Program, Run, abstract, host_copy, mesh_of
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
def program(shape: tuple[int, ...], name: str = "adamw") -> Program:
    """A train step with leaves beside the update: tied to a param, constant, and a key."""
    more = {"fixed": jnp.ones((64, 128)), "key": jax.random.key_data(jax.random.key(3))}
    more["tied"] = support.initial_params()["in"]["kernel"]

    def follow(before: Any, after: Any) -> Any:
        tied = after["params"]["in"]["kernel"] + 0.0
        return {"tied": tied, "key": before["key"] + jnp.uint32(1)}

    recorded = support.recorded(OPTIMIZERS[name]())
    return support.program_of(mesh_of(shape), *recorded, more=more, follow=follow)


def resumed(loop: Loop, run: Run) -> None:
    """Goes on in a new manager from the newest step, on the devices of another run."""
    run.count, loop.run = loop.run.count, run
    loop.reopen()


def trained(root: Any, shapes: Any, name: str = "adamw", **options: Any) -> Loop:
    """Saves three steps on each mesh, one after another."""
    first, *others = (program(shape, name) for shape in shapes)
    with Loop(root, first.run(), **options) as loop:
        loop.save(3)
        for each in others:
            resumed(loop, each.run())
            loop.save(3)
    return loop


def assert_whole(loop: Loop, shapes: Any, root: Any = None) -> str:
    """Every step has its bits on every mesh, and on the tools' one device."""
    loop.root = root or loop.root
    for shape in shapes:
        loop.verify(mesh_of(shape))
    report = audit.verify_root(loop.root, read_data=True, replay=True)
    assert (report.damaged_count, report.not_looked_at) == (0, ())
    assert all("replay" in row.checked and not row.rounded for row in report.steps)
    return "".join(kinds(loop.root))


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
    loop = trained(tmp_path, shapes, name)
    assert {each.checked for each in loop.deltas.values()} == {"full"}
    assert recut(tmp_path) == [4, 7]  # those behind are cut as these are
    assert assert_whole(loop, {*shapes, (2, 2)}) == "BRRRRRRRR"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"shadow": support.SHADOWS["sample"]}, {"shadow": support.SHADOWS["full"]}, {"delta": "bits"}],
    ids=["sample", "full", "bits"],
)
def test_without_a_shadow_in_host_memory_too(tmp_path, options):
    loop = trained(tmp_path, [(8,), (2, 2), (1,)], **options)
    expected = "B" + ("D" if "delta" in options else "R") * 8
    assert assert_whole(loop, [(8,), (2, 2)]) == expected


@pytest.mark.slow
def test_steps_are_recorded_behind_a_restart(tmp_path):
    with trained(tmp_path, [(2, 4)]) as loop:
        resumed(loop, program((4, 2)).run())
        assert loop.keep(2) == "rr"
        loop.save(2)
    assert holders(tmp_path) == {1: 1, 2: 2, 3: 3, 4: 6, 5: 6, 6: 6, 7: 7}
    assert recut(tmp_path) == [6]
    assert_whole(loop, [(2, 4), (4, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("has_shadow", [True, False])
def test_a_run_goes_back_and_forth_in_one_process(tmp_path, has_shadow):
    """What was planned for the boxes of one mesh is not taken for those of another."""
    options = {} if has_shadow else {"shadow": None}
    with Loop(tmp_path, program((4, 2)).run(), **options) as loop:
        loop.save(3)
        for shape in ((2, 2), (4, 2)):
            moved = program(shape).run()
            args = adacheck.RestoreArgs(abstract(moved.state))
            moved.state, moved.count = loop.manager.restore(loop.number, args=args), loop.number
            loop.run = moved
            loop.save(3)
    found = assert_whole(loop, [(4, 2), (2, 2)])
    # Not in the course of training: the shadow stays where it is, and the save is a base.
    assert found == "BRRRRRRRR" if not has_shadow else "B" in found[1:]


def _leaf(root: Any, step: int, path: str) -> Leaf:
    """A leaf, in the boxes that a step has it in."""
    leaves = lookup.resolve(root / str(step) / "default").leaves
    return next(each for each in leaves if each.path == path)


@pytest.mark.slow
def test_steps_of_several_meshes_are_compacted_compared_and_copied(tmp_path):
    root, meshes = tmp_path / "run", [(2, 4), (4, 2)]
    loop = trained(root, meshes)
    assert {len(_leaf(root, n, "fixed").owners) for n in range(1, 7)} == {8}
    assert _leaf(root, 3, "fixed").cuts != _leaf(root, 4, "fixed").cuts
    found = tally_of(step.lineage for step in RecordedSteps(root).steps.values())
    described = inspection.describe_step(root, 6)
    assert sum(found.values()) == 6 * sum(each.leaf_bytes for each in described.leaves)
    copying.copy(root, tmp_path / "copy")
    assert_whole(loop, meshes, tmp_path / "copy")
    loop.root = root
    for number in (5, 2):
        support.compact(root, number)
        assert isinstance(lookup.resolve(root / str(number) / "default").manifest, BaseManifest)
        assert_whole(loop, meshes)
    with loop:
        loop.reopen()
        loop.save(2)
    assert recut(root) == [4]  # and the base in the place of step 5 is cut as that was
    assert assert_whole(loop, meshes) == "BBRRBRRR"


@pytest.mark.slow
def test_a_lineage_of_two_meshes_ends_with_a_base_of_the_loop(tmp_path, monkeypatch):
    """A base in the background is cut and described as the one before it."""
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))
    policy = adacheck.AdaptivePolicy(most_deltas=4)
    with Loop(tmp_path, program((2, 4)).run(), max_deltas=policy) as loop:
        loop.save(2)
        resumed(loop, program((4, 2)).run())
        for _ in range(6):
            loop.save()
    bases = [x.manifest for x in roots.steps_of(tmp_path) if isinstance(x.manifest, BaseManifest)]
    assert [each.step for each in bases] == [1, 5]  # and none in the place of step 4
    assert "full" in bases[1].reason
    assert_whole(loop, [(2, 4), (4, 2)])


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
    loop, is_exact = None, expected == "BRRR"
    for shape in shapes:
        run = separate_run(mesh_of(shape), tx)
        run.advance()  # its state lies where its update leaves it
        if loop is None:
            loop = Loop(tmp_path, run)
        else:
            resumed(loop, run)
        loop.save(2)
    assert loop.check() == expected
    assert bool(recut(tmp_path)) == is_exact
    if is_exact:
        assert {each.checked for each in loop.deltas.values()} == {"identity"}
    for shape in {*shapes, *([(1, 1)] if is_exact else [])}:
        state = separate_run(mesh_of(shape), tx).advance()
        assert_all_restorable(tmp_path, loop.states, state)


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
