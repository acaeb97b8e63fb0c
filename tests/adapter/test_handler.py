"""Saving every step and restoring it, through every door that Orbax has."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.format import manifest
from adacheck_jax.store.steps import lookup, manifest_file, roots
from tests import support
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps

MESHES = [(4, 2), (2, 4), (8, 1), (1, 1), (8,)]
RUNS = {"dict": support.dict_run, "linen": support.linen_run, "nnx": support.nnx_run}


def kinds_of(root: Path) -> dict[int, str]:
    """Step to "base" or "delta", as it lies on disk."""
    return {s.step: type(s.manifest).__name__[:-8].lower() for s in roots.steps_of(root)}


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("form", RUNS)
@pytest.mark.parametrize("save_mesh", [(4, 2), (2, 2)])
def test_every_step_restores_bit_exact_on_every_mesh(tmp_path, form, save_mesh):
    run = RUNS[form](mesh_of(save_mesh))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=3)) as manager:
        saved = save_steps(manager, run, 5)
    assert kinds_of(tmp_path) == {1: "base", 2: "delta", 3: "delta", 4: "delta", 5: "base"}
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        for shape in MESHES:
            for step in (1, 4) if shape != (2, 4) else saved:
                target = abstract(run.state, mesh_of(shape))
                restored = manager.restore(step, args=adacheck.RestoreArgs(target))
                assert_same_bits(restored, saved[step])
                for leaf, wanted in zip(
                    jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
                ):
                    assert leaf.sharding == wanted.sharding


@pytest.mark.first(1, slow=2)
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "schedule"])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_element_wise_optimizers_are_exact_on_other_meshes(tmp_path, name, dtype):
    tx = {
        "adamw": optax.adamw(1e-2),
        "lion": optax.lion(1e-3),
        "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 50)),
    }[name]
    run = support.dict_run(mesh_of((4, 2)), tx, dtype)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 4)
        for shape in ((2, 4), (1, 1)):
            target = abstract(run.state, mesh_of(shape))
            assert_same_bits(manager.restore(4, args=adacheck.RestoreArgs(target)), saved[4])
    assert kinds_of(tmp_path)[4] == "delta"


@pytest.mark.slow
def test_explicit_axes_save_and_restore(tmp_path):
    run = support.dict_run(mesh_of((4, 2), AxisType.Explicit))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        for axis_type in (AxisType.Explicit, AxisType.Auto):
            target = abstract(run.state, mesh_of((2, 4), axis_type))
            assert_same_bits(manager.restore(3, args=adacheck.RestoreArgs(target)), saved[3])


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    """The buffers are overwritten while the save is still in flight."""
    run = support.dict_run(mesh_of((4, 2)))
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    handler = adacheck.AdaCheckHandler(run.recorder)
    saved = {}
    with manager_of(tmp_path, handler) as manager:
        for _ in range(3):
            state = run.advance()
            saved[run.count] = host_copy(state)
            doomed = jax.tree.map(jnp.copy, state)
            manager.save(run.count, args=adacheck.SaveArgs(doomed))
            jax.block_until_ready(scramble(doomed))
        manager.wait_until_finished()
        for step, expected in saved.items():
            target = abstract(run.state)
            assert_same_bits(manager.restore(step, args=adacheck.RestoreArgs(target)), expected)


def test_a_lineage_goes_on_after_a_restart(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 3)
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        run.state = manager.restore(3, args=adacheck.RestoreArgs(abstract(run.state)))
        saved = save_steps(manager, run, 2)
        assert kinds_of(tmp_path)[4] == kinds_of(tmp_path)[5] == "delta"
        target = abstract(run.state, mesh_of((2, 4)))
        assert_same_bits(manager.restore(5, args=adacheck.RestoreArgs(target)), saved[5])


@pytest.mark.slow
def test_a_lineage_goes_on_after_a_restart_on_another_mesh(tmp_path):
    first = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(first.recorder)) as manager:
        save_steps(manager, first, 2)
    run = support.dict_run(mesh_of((2, 4)))
    run.count = 2
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        run.state = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state)))
        save_steps(manager, run, 2)
    assert kinds_of(tmp_path) == {1: "base", 2: "delta", 3: "delta", 4: "delta"}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    straight = support.dict_run(mesh_of((4, 2)))
    for _ in range(6):
        straight.advance()
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 4)
    resumed = support.dict_run(mesh_of((4, 2)))
    resumed.count = 4
    with manager_of(tmp_path, adacheck.AdaCheckHandler(resumed.recorder)) as manager:
        resumed.state = manager.restore(4, args=adacheck.RestoreArgs(abstract(run.state)))
    for _ in range(2):
        resumed.advance()
    assert_same_bits(resumed.state, host_copy(straight.state))


class TestDecisions:
    """When a base is due."""

    def test_without_a_recorder_every_step_is_a_base(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            saved = save_steps(manager, run, 2)
            restored = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state)))
        assert set(kinds_of(tmp_path).values()) == {"base"}
        assert_same_bits(restored, saved[2])

    def test_a_skipped_update_makes_a_base(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            run.advance()
            save_steps(manager, run, 2)
        assert kinds_of(tmp_path) == {1: "base", 2: "delta", 4: "base", 5: "delta"}

    def test_saving_twice_without_an_update_stores_no_record(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            state = {**run.state, "step": run.state["step"] + 100}
            expected = host_copy(state)
            manager.save(7, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            delta = manifest_file.read(tmp_path / "7" / "default")
            assert isinstance(delta, manifest.DeltaManifest)
            assert not delta.has_update
            restored = manager.restore(7, args=adacheck.RestoreArgs(abstract(state)))
        assert_same_bits(restored, expected)

    def test_params_changed_by_hand_without_an_update_are_stored_in_the_delta(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            params = {**run.state["params"], "scale": run.state["params"]["scale"] * 2}
            state = {**run.state, "params": params}
            manager.save(3, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            restored = manager.restore(3, args=adacheck.RestoreArgs(abstract(state)))
        delta = manifest_file.read(tmp_path / "3" / "default")
        paths = [leaf.path for leaf in manifest_file.read(tmp_path / "1" / "default").leaves]
        assert not delta.has_update
        assert [paths[i] for i in delta.stored] == ["params/scale"]
        assert "params/scale" in delta.caution.reason
        assert_same_bits(restored, host_copy(state))

    def test_a_changed_tree_makes_a_base(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            run.advance()
            state = {**run.state, "note": jnp.zeros(3)}
            manager.save(3, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
        assert kinds_of(tmp_path)[3] == "base"

    @pytest.mark.slow
    def test_a_changed_update_program_makes_a_base(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)), optax.adamw(1e-2))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
        changed = support.dict_run(mesh_of((4, 2)), optax.adamw(2e-2))
        changed.count = 2
        with manager_of(tmp_path, adacheck.AdaCheckHandler(changed.recorder)) as manager:
            target = abstract(changed.state)
            changed.state = manager.restore(2, args=adacheck.RestoreArgs(target))
            saved = save_steps(manager, changed, 2)
            restored = manager.restore(4, args=adacheck.RestoreArgs(target))
        assert kinds_of(tmp_path) == {1: "base", 2: "delta", 3: "base", 4: "delta"}
        assert_same_bits(restored, saved[4])

    def test_max_deltas_bounds_a_lineage(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=0)) as manager:
            save_steps(manager, run, 3)
        assert set(kinds_of(tmp_path).values()) == {"base"}


class TestDoors:
    """Every way in which Orbax lets a handler in."""

    def test_handler_registry(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        handler = adacheck.AdaCheckHandler(run.recorder)
        registry = ocp.DefaultCheckpointHandlerRegistry()
        registry.add("state", adacheck.SaveArgs, handler)
        registry.add("state", adacheck.RestoreArgs, handler)
        with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
            for step in (1, 2):
                run.advance()
                args = ocp.args.Composite(state=adacheck.SaveArgs(run.state))
                manager.save(step, args=args)
            manager.wait_until_finished()
            wanted = ocp.args.Composite(state=adacheck.RestoreArgs(abstract(run.state)))
            restored = manager.restore(2, args=wanted)["state"]
        assert kinds_of(tmp_path) == {1: "base", 2: "delta"}
        assert_same_bits(restored, host_copy(run.state))

    def test_one_item_of_a_composite_beside_json_and_a_data_iterator(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        handlers = {
            "state": adacheck.AdaCheckHandler(run.recorder),
            "config": ocp.JsonCheckpointHandler(),
            "iterator": ocp.StandardCheckpointHandler(),
        }
        with manager_of(tmp_path, handlers) as manager:
            for step in (1, 2):
                run.advance()
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=adacheck.SaveArgs(run.state),
                        config=ocp.args.JsonSave({"lr": step}),
                        iterator=ocp.args.StandardSave({"position": np.arange(step)}),
                    ),
                )
            manager.wait_until_finished()
            restored = manager.restore(
                2,
                args=ocp.args.Composite(
                    state=adacheck.RestoreArgs(abstract(run.state)),
                    config=ocp.args.JsonRestore(),
                    iterator=ocp.args.StandardRestore(),
                ),
            )
        assert_same_bits(restored["state"], host_copy(run.state))
        assert restored["config"] == {"lr": 2}
        assert list(restored["iterator"]["position"]) == [0, 1]

    def test_async_checkpointer_without_a_manager(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with ocp.AsyncCheckpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
            for step in (1, 2):
                run.advance()
                checkpointer.save(tmp_path / f"step_{step}", args=adacheck.SaveArgs(run.state))
            checkpointer.wait_until_finished()
            target = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 4))))
            restored = checkpointer.restore(tmp_path / "step_2", args=target)
        assert isinstance(manifest_file.read(tmp_path / "step_2"), manifest.DeltaManifest)
        assert_same_bits(restored, host_copy(run.state))

    def test_synchronous_checkpointer(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with ocp.Checkpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
            for step in (1, 2):
                run.advance()
                checkpointer.save(tmp_path / str(step), args=adacheck.SaveArgs(run.state))
            target = adacheck.RestoreArgs(abstract(run.state))
            restored = checkpointer.restore(tmp_path / "2", args=target)
        assert_same_bits(restored, host_copy(run.state))

    def test_a_manager_that_saves_synchronously(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler, enable_async_checkpointing=False) as manager:
            saved = save_steps(manager, run, 3)
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(3, args=target), saved[3])

    def test_restore_without_arguments_finds_the_handler(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 3)
        for step in (1, 3):
            with ocp.CheckpointManager(tmp_path) as manager:
                restored = manager.restore(step)
            assert restored["params"]["in"]["kernel"].sharding.mesh.devices.shape == (4, 2)
        assert_same_bits(restored["params"], host_copy(run.state["params"]))


@pytest.mark.parametrize("step", [1, 3])
def test_metadata_answers_for_bases_and_deltas(tmp_path, step):
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for number in (1, 2, 3):
            args = adacheck.SaveArgs(run.advance(), custom_metadata={"number": number})
            manager.save(number, args=args)
        manager.wait_until_finished()
        metadata = manager.item_metadata(step)
    assert metadata.custom_metadata == {"number": step}
    kernel = metadata.tree["params"]["in"]["kernel"]
    assert (tuple(kernel.shape), kernel.dtype) == ((support.WIDTH, 2 * support.WIDTH), jnp.float32)


class TestLikeStandard:
    """Whoever replaces StandardSave and StandardRestore loses nothing."""

    @pytest.mark.parametrize("step", [1, 2])
    def test_a_cast_at_restore(self, tmp_path, step):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            target = abstract(run.state)
            target["params"]["scale"] = jax.ShapeDtypeStruct(
                (), jnp.bfloat16, sharding=target["params"]["scale"].sharding
            )
            restored = manager.restore(step, args=adacheck.RestoreArgs(target))
        scales = [leaf for leaf in saved[step] if leaf.shape == () and leaf.dtype == np.float32]
        assert restored["params"]["scale"].dtype == jnp.bfloat16
        assert any(restored["params"]["scale"] == leaf.astype(jnp.bfloat16) for leaf in scales)

    def test_a_state_that_loses_precision_is_told_of(self, tmp_path, caplog):
        state = {"m": jnp.ones(4), "n": jnp.ones(4, jnp.bfloat16), "k": jnp.arange(3)}
        with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
            manager.save(0, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            asked = {**state, "m": state["n"], "n": state["m"]}
            narrow = manager.restore(0, args=adacheck.RestoreArgs(asked))
            assert [narrow[x].dtype.name for x in "mnk"] == ["bfloat16", "float32", "int32"]
            (told,) = [x for x in caplog.messages if "asks for less precision" in x]
            assert "leaves (1) are rounded: m (float32 as bfloat16)" in told
            caplog.clear()
            part = {**asked, "k": ocp.PLACEHOLDER}
            manager.restore(0, args=adacheck.RestoreArgs(part))
        assert not [x for x in caplog.messages if "asks for less precision" in x]

    def test_a_cast_at_save_of_a_trained_leaf_makes_bases(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            for step in (1, 2):
                state = run.advance()
                casts = jax.tree.map(lambda _: ocp.SaveArgs(), state)
                casts["params"]["in"]["kernel"] = ocp.SaveArgs(dtype=jnp.bfloat16)
                manager.save(step, args=adacheck.SaveArgs(state, save_args=casts))
            manager.wait_until_finished()
            restored = manager.restore(2)
        assert set(kinds_of(tmp_path).values()) == {"base"}
        kernel = run.state["params"]["in"]["kernel"].astype(jnp.bfloat16)
        assert_same_bits(restored["params"]["in"]["kernel"], host_copy(kernel))

    def test_a_cast_at_save_of_another_leaf_keeps_deltas(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            for step in (1, 2):
                state = {**run.advance(), "ema": jnp.full((5,), 1.0 / 3 * step)}
                casts = jax.tree.map(lambda _: None, state)
                casts["ema"] = ocp.SaveArgs(dtype=jnp.bfloat16)
                manager.save(step, args=adacheck.SaveArgs(state, save_args=casts))
            manager.wait_until_finished()
            restored = manager.restore(2)
        assert kinds_of(tmp_path) == {1: "base", 2: "delta"}
        assert_same_bits(restored["ema"], host_copy(state["ema"].astype(jnp.bfloat16)))

    @pytest.mark.parametrize("step", [1, 2])
    def test_leaves_can_be_left_out(self, tmp_path, step):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            target = abstract(run.state)
            target["opt_state"] = jax.tree.map(lambda _: ocp.PLACEHOLDER, target["opt_state"])
            target["step"] = ocp.PLACEHOLDER
            restored = manager.restore(step, args=adacheck.RestoreArgs(target))
        assert restored["step"] is ocp.PLACEHOLDER
        assert all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(restored["opt_state"]))
        full = jax.tree.unflatten(jax.tree.structure(run.state), saved[step])
        assert_same_bits(restored["params"], jax.tree.leaves(full["params"]))

    @pytest.mark.parametrize("step", [1, 2])
    def test_not_strict_truncates_and_pads(self, tmp_path, step):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            target = abstract(run.state)
            wide = target["params"]["in"]["bias"]
            target["params"]["in"]["bias"] = jax.ShapeDtypeStruct(
                (140,), wide.dtype, sharding=wide.sharding
            )
            out = target["params"]["out"]["kernel"]
            target["params"]["out"]["kernel"] = jax.ShapeDtypeStruct(
                (48, 16), out.dtype, sharding=out.sharding
            )
            restored = manager.restore(step, args=adacheck.RestoreArgs(target, strict=False))
            whole = manager.restore(step, args=adacheck.RestoreArgs(abstract(run.state)))
        bias = np.pad(np.asarray(whole["params"]["in"]["bias"]), (0, 140 - 128))
        assert_same_bits(restored["params"]["in"]["bias"], [bias])
        kernel = np.asarray(whole["params"]["out"]["kernel"])[:48, :16]
        assert_same_bits(restored["params"]["out"]["kernel"], [np.ascontiguousarray(kernel)])

    @pytest.mark.first(1)
    @pytest.mark.parametrize("step", [1, 2])
    def test_a_sharding_that_is_not_given_is_the_saved_one(self, tmp_path, step):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.state)
            restored = manager.restore(step, args=adacheck.RestoreArgs(bare))
        assert_same_bits(restored, saved[step])
        kernel = restored["params"]["in"]["kernel"]
        assert kernel.sharding.is_equivalent_to(run.state["params"]["in"]["kernel"].sharding, 2)

    @pytest.mark.first(1)
    @pytest.mark.parametrize("step", [1, 2])
    def test_host_values_keep_their_types(self, tmp_path, step):
        run = support.dict_run(mesh_of((4, 2)))
        state = {}
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            for number in (1, 2):
                state = {
                    **run.advance(),
                    "epoch": number,
                    "best": 0.5 * number,
                    "order": np.arange(number, number + 4, dtype=np.int16),
                    "key": jax.random.key(number),
                    "keys": jax.random.split(jax.random.key(number), 3),
                    "none": None,
                    "empty": {},
                }
                manager.save(number, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            target = jax.tree.map(
                lambda x: (
                    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                    if isinstance(x, jax.Array)
                    else x
                ),
                state,
            )
            for args in (None, adacheck.RestoreArgs(target)):
                restored = manager.restore(step, args=args)
                assert restored["epoch"] == step
                assert type(restored["epoch"]) is int
                assert restored["best"] == 0.5 * step
                assert restored["order"].dtype == np.int16
                assert list(restored["order"]) == list(range(step, step + 4))
                assert (restored["none"], restored["empty"]) == (None, {})
                expected = jax.random.key_data(jax.random.key(step))
                assert_same_bits(restored["key"], host_copy(expected))
                assert jnp.issubdtype(restored["keys"].dtype, jax.dtypes.prng_key)

    @pytest.mark.slow
    def test_numpy_targets_come_back_on_the_host(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), run.state)
            restored = manager.restore(2, args=adacheck.RestoreArgs(target))
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored))
        assert_same_bits(restored, saved[2])

    def test_support_layout_restores_with_the_wanted_layout(self, tmp_path):
        run = support.dict_run(mesh_of((1, 1)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), run.state
            )
            args = adacheck.RestoreArgs(target, support_layout=True)
            restored = manager.restore(2, args=args)
        assert_same_bits(restored, saved[2])
        for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(run.state), strict=True):
            assert leaf.format == wanted.format


@pytest.mark.slow
def test_stock_orbax_reads_a_base_where_this_library_cannot_be_imported(tmp_path):
    run = support.linen_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 2)
    np.savez(tmp_path / "expected.npz", *host_copy(run.state.params))
    np.save(tmp_path / "count.npy", len(jax.tree.leaves(run.state)))
    program = """
        import sys
        sys.modules["adacheck_jax"] = None  # any import of the library fails
        import jax, numpy as np, orbax.checkpoint as ocp
        root = sys.argv[1]
        tree = ocp.PyTreeCheckpointer().restore(f"{root}/1/default")
        target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
        again = ocp.StandardCheckpointer().restore(f"{root}/1/default", target)
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == b.tobytes(), tree, again)
        assert all(jax.tree.leaves(same))
        assert len(jax.tree.leaves(tree)) == np.load(f"{root}/count.npy")
        print(tree["params"]["in"]["kernel"].shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"({support.WIDTH}, {2 * support.WIDTH})" in done.stdout


def test_a_delta_holds_the_record_and_what_no_update_explains(tmp_path):
    run = support.dict_run(mesh_of((4, 2)), dtype=jnp.bfloat16)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        save_steps(manager, run, 2)
    found = lookup.resolve(tmp_path / "2" / "default")
    (delta, entry), leaves = found.saves[0], found.base.leaves
    stored = {leaves[i].path for i in delta.stored}
    params = [leaf.path for leaf in leaves if leaf.path.startswith("params/")]
    records = {p.replace("params/", "opt_state/1/adacheck_record/") for p in params}
    assert stored == records | {"step", "opt_state/1/adacheck_count"}
    record_bytes = sum(leaf.nbytes for leaf in leaves if leaf.path in records)
    assert sum(pack.raw_bytes for pack in delta.packs) <= record_bytes + 64 * len(leaves)
    body = json.loads(entry.manifest_path.read_text())
    assert "leaves" not in body


@pytest.mark.slow
def test_the_same_handler_restores_onto_a_mesh_without_the_recorders_code(tmp_path):
    """The exported update is enough: a process that never saw the optimizer restores."""
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    program = """
        import sys
        import jax, numpy as np, orbax.checkpoint as ocp
        import adacheck_jax
        sys.modules["optax"] = None
        state = ocp.CheckpointManager(sys.argv[1]).restore(3)
        np.savez(sys.argv[2], *map(np.asarray, jax.tree.leaves(state)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(tmp_path / "x.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "x.npz") as arrays:
        found = sorted(a.tobytes() for a in arrays.values())
    assert found == sorted(a.tobytes() for a in saved[3])


def test_process_local_scalars_beside_a_mesh(tmp_path):
    """A counter on one device and params on eight: the update needs both."""
    run = support.dict_run(mesh_of((4, 2)))
    run.advance()
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
        target = abstract(run.state)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding if x.ndim else single
            ),
            target,
        )
        restored = manager.restore(4, args=adacheck.RestoreArgs(target))
    assert_same_bits(restored, saved[4])
    assert restored["step"].sharding == single
    spec = restored["params"]["in"]["kernel"].sharding
    assert isinstance(spec, NamedSharding)
    assert spec.spec == PartitionSpec("data", "model")
