"""Real processes save, and another number of them restores."""

from __future__ import annotations

import uuid
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.format import manifest
from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools import audit
from tests import support
from tests.end_to_end import test_derived as derived
from tests.processes import launch, leaves


def check(root, out, steps, devices=4, run=None):
    """Restores steps of several processes in this one, which has compiled what that takes."""
    run = run or support.dict_run(support.mesh_of((devices // 2, 2)))
    target = adacheck.RestoreArgs(support.abstract(run.state))
    with adacheck.checkpoint_manager(root, run.recorder, max_to_keep=None) as manager:
        for step in steps:
            found = jax.tree.leaves(manager.restore(step, args=target))
            assert [np.asarray(x).tobytes() for x in found] == leaves(f"{out}-saved{step}.npz"), (
                step
            )


@pytest.mark.campaign
@pytest.mark.parametrize("saved_by", [2, 4, 8])
def test_every_number_of_processes_restores_what_another_one_saved(tmp_path, saved_by):
    launch("save", saved_by, tmp_path / "run", tmp_path / "out", devices=2)
    for processes in (1, 2, 4, 8):
        out = tmp_path / f"restored-by-{processes}"
        launch("restore", processes, tmp_path / "run", out, devices=2)
        for step in (1, 3):
            restored = leaves(Path(f"{out}-restored{step}.npz"))
            assert restored == leaves(tmp_path / f"out-saved{step}.npz"), (processes, step)


@pytest.mark.slow
def test_steps_are_proved_in_full_behind_a_look_at_the_newest(tmp_path):
    launch("evaluate", 2, tmp_path / "run", tmp_path / "out", devices=2)
    base, *deltas = (each.manifest for each in roots.steps_of(tmp_path / "run"))
    assert isinstance(base, manifest.BaseManifest)
    assert [each.checked for each in deltas] == ["full", "full"]
    check(tmp_path / "run", tmp_path / "out", range(1, 4))


@pytest.mark.slow
def test_a_lineage_goes_on_in_another_number_of_processes(tmp_path):
    """Processes share the writing, and prove each delta together."""
    root, saved = tmp_path / "run", {}
    for n, (processes, devices) in enumerate([(2, 2), (1, 4), (4, 2)]):
        launch("resume" if n else "save", processes, root, tmp_path / f"{n}", devices)
        steps = range(3 * n + 1, 3 * n + 4)
        saved |= {step: leaves(tmp_path / f"{n}-saved{step}.npz") for step in steps}
    base, *deltas = (each.manifest for each in roots.steps_of(root))
    assert isinstance(base, manifest.BaseManifest)
    assert all(isinstance(each, manifest.DeltaManifest) for each in deltas)
    assert [len(each.packs) for each in deltas] == [2, 2, *[1] * 3, *[4] * 3]
    assert {owner for leaf in base.leaves for owner in leaf.owners} == {0, 1}
    for each in deltas[:2]:
        sizes_bytes = [pack.raw_bytes for pack in each.packs]
        assert min(sizes_bytes) > 0.4 * max(sizes_bytes)
    assert [each.step for each in deltas if each.grids] == [4, 7]
    assert {each.checked for each in deltas} == {"full"}
    launch("restore-once", 2, root, tmp_path / "again", devices=4)
    assert {n: leaves(tmp_path / f"again-restored{n}.npz") for n in saved} == saved
    for n in range(3):
        check(root, tmp_path / f"{n}", range(3 * n + 1, 3 * n + 4), devices=8)
    support.compact(root, 5)
    run = support.dict_run(support.mesh_of((2, 2)))
    with support.manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        run.state = manager.restore(9, args=adacheck.RestoreArgs(support.abstract(run.state)))
        run.count = 9
        support.save_steps(manager, run, 3)
    report = audit.verify_root(root, read_data=True, replay=True)
    assert (report.damaged_count, report.not_looked_at) == (0, ())


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 2)])
def test_the_shadows_of_all_processes_make_bases_together(tmp_path, processes, devices):
    root = tmp_path / "run"
    launch("bases", processes, root, tmp_path / "out", devices)
    found = roots.steps_of(root)
    bases = [each.manifest for each in found if isinstance(each.manifest, manifest.BaseManifest)]
    assert [each.step for each in bases] == [1, 5, 9]
    assert all("compacted" in each.reason for each in bases[1:])
    parts = {each.name.split(".")[0] for each in (root / "5/default/adacheck/base").iterdir()}
    assert parts == {*map(str, range(processes))}
    check(root, tmp_path / "out", range(1, 13))
    with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as stock:
        described = stock.item_metadata(5).tree
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)
        state = stock.restore(5, args=ocp.args.PyTreeRestore(restore_args=wanted))
    assert sorted(each.tobytes() for each in jax.tree.leaves(state)) == sorted(
        leaves(tmp_path / "out-saved5.npz")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bases"), [("bases-lost", [1, 8]), ("bases-refused", [1, 6, 11])])
def test_where_one_process_writes_no_part_of_a_base_the_loop_writes_the_next(tmp_path, mode, bases):
    """It cannot, or was told to make none."""
    root = tmp_path / "run"
    launch(mode, 2, root, tmp_path / "out", devices=2)
    found = {each.step: each.manifest for each in roots.steps_of(root)}
    assert [*found] == [*range(1, 13)]
    assert [n for n, x in found.items() if isinstance(x, manifest.BaseManifest)] == bases
    assert all("full" in found[step].reason for step in bases[1:])
    assert not [x for x in root.iterdir() if not x.name.isdigit()], "something was left"


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", SCHEMES)
def test_several_processes_save_into_an_object_store(tmp_path, request, kind):
    root = f"{request.getfixturevalue(kind).url}/{uuid.uuid4().hex}"
    launch("save", 2, root, tmp_path / "out", devices=2)
    check(root, tmp_path / "out", (1, 3))
    launch("resume", 2, root, tmp_path / "resumed", devices=2)
    found = [step.manifest for step in roots.steps_of(located(root))]
    assert [type(each) for each in found] == [manifest.BaseManifest] + [manifest.DeltaManifest] * 5
    assert all(len(each.packs) == 2 for each in found[1:])


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("mode", "kinds", "has_update"),
    [("bits", "BDD", [False, False]), ("projected", "BDD", [True, True])],
)
def test_several_processes_save_differences(tmp_path, mode, kinds, has_update):
    """Where they were told to, and where their check found that replay is wrong."""
    launch(mode, 2, tmp_path / "run", tmp_path / "out", devices=2)
    found = [step.manifest for step in roots.steps_of(tmp_path / "run")]
    assert support.kinds_of(tmp_path / "run") == kinds
    assert [each.has_update for each in found[1:]] == has_update
    if mode == "bits":
        assert all({"x", "s"} & set(pack.encodings) for pack in found[-1].packs)
    if mode == "projected":
        paths = [leaf.path for leaf in found[0].leaves]
        wrong = paths.index("params/in/kernel")
        for each in found[1:]:
            assert wrong in each.stored
            assert paths.index("params/out/kernel") not in each.stored
            assert "params/in/kernel" in each.caution.reason
            assert each.checked == "full"  # by the shadows, which have what was stored
    check(tmp_path / "run", tmp_path / "out", (1, 3), devices=8)


def checked_of(root):
    found = [step.manifest for step in roots.steps_of(root)]
    return [getattr(each, "checked", "base") for each in found]


@pytest.mark.slow
def test_the_shadows_follow_a_learning_rate_that_lies_in_the_state(tmp_path):
    root = tmp_path / "run"
    launch("hyperparams", 2, root, tmp_path / "out", devices=2)
    assert checked_of(root) == ["base", "full", "full"]
    tx = optax.inject_hyperparams(optax.adamw)(1e-2)
    check(root, tmp_path / "out", (1, 2, 3), run=support.dict_run(support.mesh_of((2, 2)), tx))


@pytest.mark.slow
def test_an_element_changed_by_hand_is_refused_by_all_processes(tmp_path):
    """No sample is certain to meet it; each process has a part of its leaf."""
    launch("edited", 2, tmp_path / "run", tmp_path / "out", devices=2)
    told = [(tmp_path / f"out-refused{n}").read_text() for n in range(2)]
    assert all(each.startswith("4: ") and "params/in/kernel" in each for each in told)
    assert [step.step for step in roots.steps_of(tmp_path / "run")] == [1, 2, 3, 5, 6]
    assert checked_of(tmp_path / "run") == ["base", "full", "full", "base", "full"]
    check(tmp_path / "run", tmp_path / "out", (3, 6))


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("mode", ["edited-small", "edited-small-sample"])
def test_an_edit_that_its_owner_does_not_see_is_refused_once_and_stored_from_then_on(
    tmp_path, mode
):
    """Of a vector that both have each process samples half, and one of them owns it."""
    root = tmp_path / "run"
    launch(mode, 2, root, tmp_path / "out", devices=2)
    refused = [Path(f"{tmp_path}/out-refused{process}").read_text() for process in (0, 1)]
    lost = {int(each.partition(":")[0]) for each in refused}
    assert len(lost) == 1
    assert lost < {4, 6}
    assert all("params/in/bias" in each and "does not own" in each for each in refused)
    saved = sorted({*range(1, 11)} - lost)
    assert [each.manifest.step for each in roots.steps_of(root)] == saved
    check(root, tmp_path / "out", saved)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("mode", ["derived", "derived-edited"])
def test_several_processes_replay_an_average_and_a_target_network(tmp_path, mode):
    launch(mode, 2, tmp_path / "run", tmp_path / "out", devices=2)
    found = [step.manifest for step in roots.steps_of(tmp_path / "run")]
    assert checked_of(tmp_path / "run")[0] == "base"
    paths = [leaf.path for leaf in found[0].leaves]
    for each in found[1:]:
        stored = [paths[i] for i in each.stored if paths[i].startswith(("ema/", "target/"))]
        is_edited = mode == "derived-edited" and each.step == 3
        assert {path[:4] for path in stored} == ({"ema/"} if is_edited else set())
    functions = {"ema": derived.average, "target": derived.hard_copy}
    run = derived.dict_program(support.mesh_of((2, 2)), functions).run()
    check(tmp_path / "run", tmp_path / "out", (2, 4), run=run)


@pytest.mark.slow
def test_a_process_that_owns_no_scalar_checks_its_share(tmp_path):
    launch("no-scalars", 2, tmp_path / "run", tmp_path / "out", devices=2)
    found = [step.manifest for step in roots.steps_of(tmp_path / "run")]
    assert checked_of(tmp_path / "run") == ["base", "full", "full"]
    assert not any(each.caution.reason for each in found)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_leaves_on_devices_of_one_process_are_restored_there(tmp_path, processes, devices):
    worker = "tests.end_to_end.one_holder_worker"
    launch("save", 1, tmp_path / "run", tmp_path / "out", 2, worker)
    assert support.kinds_of(tmp_path / "run") == "BDD"
    launch("restore", processes, tmp_path / "run", tmp_path / "out", devices, worker)
