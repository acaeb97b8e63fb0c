"""Saving every step and restoring it: the bits, what each delta holds, and when a base is due."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import lookup, manifest_file, roots
from tests import support
from tests.support import (
    abstract,
    assert_same_bits,
    assert_steps,
    host_copy,
    kinds_of,
    manager_of,
    mesh_of,
    restored,
    save_steps,
)

FORMS = {
    "dict": support.dict_run,
    "linen": support.linen_run,
    "nnx": support.nnx_run,
    "explicit axes": lambda mesh: support.dict_run(mesh_of(mesh.devices.shape, AxisType.Explicit)),
}


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save_mesh", [(4, 2), (2, 2)])
def test_every_step_restores_bit_exact_on_every_mesh(tmp_path, form, save_mesh):
    run = FORMS[form](mesh_of(save_mesh))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, max_deltas=3)) as manager:
        saved = save_steps(manager, run, 5)
    assert kinds_of(tmp_path) == "BDDDB"
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        targets = [mesh_of(shape) for shape in ((4, 2), (2, 4), (8, 1), (1, 1), (8,))]
        for mesh in (*targets, mesh_of((2, 4), AxisType.Explicit)):
            for step in (1, 4) if mesh.devices.shape != (2, 4) else saved:
                target = abstract(run.state, mesh)
                found = manager.restore(step, args=adacheck.RestoreArgs(target))
                assert_same_bits(found, saved[step])
                for leaf, wanted in zip(*map(jax.tree.leaves, (found, target)), strict=True):
                    assert leaf.sharding == wanted.sharding


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "params",
    [
        {
            "a": jnp.ones(16),
            "a/value": jnp.ones(16),
            "layers": [jnp.ones(3), ({"w": jnp.ones(9)},)],
        },
        jnp.linspace(0.0, 1.0, 16),
        {"value": jnp.ones(16), "value/value": jnp.full(16, 2.0)},
        {"tied": jnp.ones(16), "half": jnp.ones(16, jnp.bfloat16)},
    ],
    ids=["a and a/value", "bare array", "value/value", "mixed types"],
)
def test_params_of_odd_shapes_and_names(tmp_path, params):
    """Gradients come from outside: XLA:CPU would fuse their computation into the update."""
    recorder = adacheck.Recorder(optax.adam(1e-2))

    @jax.jit
    def update(state, grads):
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    def step(state, _data):
        return update(state, jax.tree.map(lambda p: jnp.sin(p * 10), state["params"]))

    run = support.Run(recorder, {"params": params, "opt_state": recorder.init(params)}, step)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert kinds_of(tmp_path) == "BDD"
    assert_steps(tmp_path, saved, run.state)


def save(manager, step, state):
    manager.save(step, args=adacheck.SaveArgs(state))
    manager.wait_until_finished()
    return {step: host_copy(state)}


class TestDecisions:
    """When a base is due, and what a delta holds."""

    def test_a_skipped_update_and_another_tree_make_bases(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            run.advance()
            save_steps(manager, run, 2)
            for step, added in enumerate(({"note": 3}, {"note": 4}, {"notes": 4}), start=6):
                save(
                    manager, step, {**run.advance(), **{k: jnp.zeros(n) for k, n in added.items()}}
                )
        assert kinds_of(tmp_path) == "BDBDBBB"
        bases = [manifest_file.read(tmp_path / str(step) / "default") for step in (6, 7, 8)]
        count = len(bases[0].leaves)
        assert [each.reason for each in bases] == [
            f"the state has {count} leaves, the step before {count - 1}",
            "note changed from float32[3] to float32[4]",
            "the tree changed: notes where note was",
        ]

    def test_a_delta_holds_the_record_and_what_no_update_explains(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)), dtype=jnp.bfloat16)
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
        found = lookup.resolve(tmp_path / "2" / "default")
        (delta, entry), leaves = found.saves[0], found.base.leaves
        params = [leaf.path for leaf in leaves if leaf.path.startswith("params/")]
        records = {p.replace("params/", "opt_state/1/adacheck_record/") for p in params}
        stored = {leaves[i].path for i in delta.stored}
        assert stored == records | {"step", "opt_state/1/adacheck_count"}
        record_bytes = sum(leaf.nbytes for leaf in leaves if leaf.path in records)
        assert sum(pack.raw_bytes for pack in delta.packs) <= record_bytes + 64 * len(leaves)
        assert "leaves" not in json.loads(entry.manifest_path.read_text())

    def test_deleting_steps_to_go_back_is_no_warning(self, tmp_path, caplog):
        states = [{"x": jnp.arange(9.0) + step} for step in range(4)]
        with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
            for step in (1, 2, 3):
                save(manager, step, states[step])
            manager.restore(1, args=adacheck.RestoreArgs(states[1]))
            for step in (3, 2):
                manager.delete(step)
            caplog.clear()
            with caplog.at_level("INFO", logger="adacheck_jax.save.line.parents"):
                again = save(manager, 2, states[2])
        own = [x for x in caplog.records if x.name.startswith("adacheck_jax")]
        assert not [x for x in own if x.levelname in ("WARNING", "ERROR")]
        told = [x.getMessage() for x in own]
        assert "Step 3 was deleted; the next step does not build on it." in told
        assert_same_bits(restored(tmp_path, 2, states[2]), again[2])

    def test_a_root_that_is_gone_is_told_and_begun_anew(self, tmp_path, caplog):
        run, root = support.dict_run(mesh_of((2, 2))), tmp_path / "root"
        with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
            save_steps(manager, run, 2)
            shutil.rmtree(root)  # or a disk is not mounted any more
            saved = save_steps(manager, run, 2)
        (told,) = (x.getMessage() for x in caplog.records if "is mounted" in x.getMessage())
        assert f"{root}: expected the steps of this run, found none; step 2 was the last" in told
        for step, expected in saved.items():
            assert_same_bits(restored(root, step, run.state), expected)

    def test_what_changes_without_an_update_is_stored_and_no_record(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            state = {**run.state, "step": run.state["step"] + 100}
            saved |= save(manager, 7, state)
            params = {**run.state["params"], "scale": run.state["params"]["scale"] * 2}
            saved |= save(manager, 8, {**state, "params": params})
        assert_steps(tmp_path, saved, run.state)
        paths = [leaf.path for leaf in manifest_file.read(tmp_path / "1" / "default").leaves]
        for step, path in ((7, "step"), (8, "params/scale")):
            delta = manifest_file.read(tmp_path / str(step) / "default")
            assert isinstance(delta, DeltaManifest)
            assert not delta.has_update
            assert [paths[i] for i in delta.stored] == [path]
        assert "params/scale" in delta.caution.reason

    @pytest.mark.slow
    def test_another_update_program_makes_a_base(self, tmp_path):
        saved = {}
        for rate in (1e-2, 2e-2):
            run = support.dict_run(mesh_of((4, 2)), optax.adamw(rate))
            with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
                if saved:
                    args = adacheck.RestoreArgs(abstract(run.state))
                    run.state, run.count = manager.restore(2, args=args), 2
                saved |= save_steps(manager, run, 2)
        assert kinds_of(tmp_path) == "BDBD"
        assert_steps(tmp_path, saved, run.state)

    def test_looking_at_an_older_step_goes_on_and_going_back_begins_anew(self, tmp_path):
        run = support.dict_run(mesh_of((2, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 4)
            args = adacheck.RestoreArgs(abstract(run.state))
            older = manager.restore(2, args=args)
            assert_same_bits(older, saved[2])
            saved |= save_steps(manager, run, 1)
            manager.restore(2, args=args)
            run.state, run.count = older, 10
            saved |= save_steps(manager, run, 2)
        assert kinds_of(tmp_path) == "BDDDDBD"  # the shadow cannot go back
        assert_steps(tmp_path, saved, run.state)

    def test_looking_at_the_newest_step_or_going_back_to_it_changes_nothing(self, tmp_path):
        run = support.dict_run(mesh_of((2, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 3)
            args = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(3, args=args), saved[3])  # to be evaluated
            saved |= save_steps(manager, run, 2)
            run.advance()  # a step that is not saved
            run.state, run.count = manager.restore(5, args=args), 5
            saved |= save_steps(manager, run, 1)
        assert kinds_of(tmp_path) == "BDDDDD"
        assert {each.manifest.checked for each in roots.steps_of(tmp_path)[1:]} == {"full"}
        assert_steps(tmp_path, saved, run.state)

    def test_a_delta_needs_none_of_the_steps_before_it(self, tmp_path):
        run = support.dict_run(mesh_of((2, 2)))
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
            manager.save(3, args=adacheck.SaveArgs(run.advance()))
            manager.delete(1)
            saved = {3: host_copy(run.state)}
            manager.wait_until_finished()
            shutil.rmtree(tmp_path / "2")
        assert_steps(tmp_path, saved, run.state)

    def test_another_run_beside_this_one_is_no_parent(self, tmp_path):
        run = support.dict_run(mesh_of((2, 2)))
        with ocp.AsyncCheckpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
            for name in ("run_1/step_0", "run_2/step_1", "run_2/step_2"):
                checkpointer.save(tmp_path / name, args=adacheck.SaveArgs(run.advance()))
                checkpointer.wait_until_finished()
            target = adacheck.RestoreArgs(abstract(run.state))
            found = checkpointer.restore(tmp_path / "run_2/step_2", args=target)
        assert [s.step for s in roots.steps_of(tmp_path / "run_2")] == [1, 2]
        assert kinds_of(tmp_path / "run_2") == "BD"
        assert_same_bits(found, host_copy(run.state))


def test_casts_at_a_save(tmp_path):
    """Of a leaf that is trained they make bases; of another one deltas stay deltas."""
    run = support.dict_run(mesh_of((4, 2)))
    for path in ("kernel", "ema"):
        with manager_of(tmp_path / path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            for step in (1, 2):
                state = {**run.advance(), "ema": jnp.full((5,), 1.0 / 3 * step)}
                casts = jax.tree.map(lambda _: None, state)
                where = casts if path == "ema" else casts["params"]["in"]
                where[path] = ocp.SaveArgs(dtype=jnp.bfloat16)
                manager.save(step, args=adacheck.SaveArgs(state, save_args=casts))
        found = restored(tmp_path / path, 2)
        for name, leaf, own in (
            ("ema", found["ema"], state["ema"]),
            ("kernel", found["params"]["in"]["kernel"], state["params"]["in"]["kernel"]),
        ):
            assert_same_bits(leaf, host_copy(own.astype(jnp.bfloat16) if name == path else own))
    assert [kinds_of(tmp_path / path) for path in ("kernel", "ema")] == ["BB", "BD"]


def test_a_state_that_loses_precision_is_told_of(tmp_path, caplog):
    state = {"m": jnp.ones(4), "n": jnp.ones(4, jnp.bfloat16), "k": jnp.arange(3)}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        save(manager, 0, state)
    asked = {**state, "m": state["n"], "n": state["m"]}
    narrow = restored(tmp_path, 0, asked)
    assert [narrow[x].dtype.name for x in "mnk"] == ["bfloat16", "float32", "int32"]
    (told,) = [x for x in caplog.messages if "asks for less precision" in x]
    assert "leaves (1) are rounded: m (float32 as bfloat16)" in told
    caplog.clear()
    restored(tmp_path, 0, {**asked, "k": ocp.PLACEHOLDER})
    assert not [x for x in caplog.messages if "asks for less precision" in x]


@pytest.mark.parametrize(
    "metadata", [{2: "a", 10: "b"}, {"nested": {1: [1, 2]}}, [1], "text", None]
)
def test_custom_metadata_of_any_json(tmp_path, metadata):
    with manager_of(tmp_path, adacheck.AdaCheckHandler(delta="bits")) as manager:
        for step in (1, 2):
            state = {"x": jnp.arange(9.0) + step}
            manager.save(step, args=adacheck.SaveArgs(state, custom_metadata=metadata))
        manager.wait_until_finished()
        found = [manager.item_metadata(step).custom_metadata for step in (1, 2)]
    assert found[0] == found[1] == json.loads(json.dumps(metadata))
    assert kinds_of(tmp_path) == "BD"
    assert_same_bits(restored(tmp_path, 2, state), host_copy(state))


@pytest.mark.slow
def test_stock_orbax_reads_a_base_and_processes_a_delta_where_modules_are_missing(tmp_path):
    """Bases need Orbax alone; deltas need no optimizer, for which the exported update is enough."""
    run = support.linen_run(mesh_of((4, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
    base = """
        import sys
        sys.modules["adacheck_jax"] = None  # any import of the library fails
        import jax, numpy as np, orbax.checkpoint as ocp
        tree = ocp.PyTreeCheckpointer().restore(f"{sys.argv[1]}/1/default")
        target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
        again = ocp.StandardCheckpointer().restore(f"{sys.argv[1]}/1/default", target)
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == b.tobytes(), tree, again)
        assert all(jax.tree.leaves(same))
        np.savez(sys.argv[2], *map(np.asarray, jax.tree.leaves(tree)))
    """
    delta = """
        import sys
        import jax, numpy as np, orbax.checkpoint as ocp
        import adacheck_jax
        sys.modules["optax"] = None
        state = ocp.CheckpointManager(sys.argv[1]).restore(2)
        np.savez(sys.argv[2], *map(np.asarray, jax.tree.leaves(state)))
    """
    for step, program in ((1, base), (2, delta)):
        out = tmp_path / f"{step}.npz"
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with np.load(out) as arrays:
            found = sorted(each.tobytes() for each in arrays.values())
        assert found == sorted(each.tobytes() for each in saved[step])
