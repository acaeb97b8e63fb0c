"""Leaves that are saved with bases alone: what error feedback keeps, and how a restore tells so."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.errors import IntegrityError, RecorderError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.schedule import line
from adacheck_jax.schedule.waste import Schedule
from adacheck_jax.store.steps import roots
from tests import support
from tests.processes import launch
from tests.save.test_background_bases import trained
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps

RESIDUAL = "opt_state/0/residual"
PATHS = {f"{RESIDUAL}/{name}" for name in ("in/bias", "in/kernel", "out/kernel", "scale")}


class FeedbackState(NamedTuple):
    residual: Any


def top_k_with_feedback(share):
    """Passes on the largest elements, and adds the others to the next gradient."""

    def update(updates, state, params=None):
        def split(gradient, rest):
            whole = gradient + rest
            count = max(1, int(whole.size * share))
            least = jax.lax.top_k(jnp.abs(whole).reshape(-1), count)[0][-1]
            return jnp.where(jnp.abs(whole) >= least, whole, 0)

        passed = jax.tree.map(split, updates, state.residual)
        rest = jax.tree.map(lambda g, r, p: g + r - p, updates, state.residual, passed)
        return passed, FeedbackState(rest)

    return optax.GradientTransformation(
        lambda params: FeedbackState(jax.tree.map(jnp.zeros_like, params)), update
    )


def run_of(mesh, **options):
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    chain = optax.chain(top_k_with_feedback(0.05), recorder)
    run = support.program_of(mesh, recorder, chain).run()
    return run, adacheck.AdaCheckHandler(
        recorder, params_path="params", ephemeral=["*/residual"], **options
    )


def assert_stale(root, run, saved, step, since, holder=None, mesh=None):
    """A step restores, but for its residual, which is as an earlier step had it."""
    handler = adacheck.AdaCheckHandler()
    with manager_of(root, handler) as manager:
        target = abstract(run.state, mesh or mesh_of((2, 2)))
        args = adacheck.RestoreArgs(target, step=None if holder is None else step)
        state, info = manager.restore(holder or step, args=args), handler.restored
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    rows = zip(paths, saved[since], saved[step], strict=True)
    assert_same_bits(state, [old if "residual" in path else new for path, old, new in rows])
    assert info.stale == ({} if step == since else dict.fromkeys(PATHS, since))
    assert info.exact == (step == since)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("delta", ["auto", "bits"])
def test_a_step_between_bases_has_the_residual_of_the_last_one(tmp_path, delta, caplog):
    run, handler = run_of(mesh_of((2, 2)), max_deltas=3, delta=delta)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 6)
    kinds = [isinstance(step.manifest, BaseManifest) for step in roots.steps_of(tmp_path)]
    assert kinds == [True, False, False, False, True, False]
    for step, since in ((1, 1), (2, 1), (4, 1), (5, 5), (6, 5)):
        caplog.clear()
        for mesh in (mesh_of((2, 2)), mesh_of((8,))):
            assert_stale(tmp_path, run, saved, step, since, mesh=mesh)
        told = [r for r in caplog.records if "ephemeral" in r.message]
        assert bool(told) == (step != since)
    target = abstract(run.state)
    support.restored(tmp_path, 5, target, require_exact=True)
    with pytest.raises(IntegrityError, match=r"ephemeral.*require_exact=True"):
        support.restored(tmp_path, 4, target, require_exact=True)
    for options in ([], ["--read-data"], ["--replay"]):
        found = CliRunner().invoke(app, ["verify", str(tmp_path), "--json", *options])
        assert found.exit_code == 0, found.output
        steps = json.loads(found.output)["steps"]
        assert [{*each["stale"]} for each in steps] == [set() if x else PATHS for x in kinds]
    stored = roots.steps_of(tmp_path)[1].manifest  # of codes, or of what Adam changes
    count = sum(np.size(x) for x in jax.tree.leaves(run.state["params"]))
    stored_bytes = sum(pack.raw_bytes + pack.compressed_bytes for pack in stored.packs)
    assert delta == "bits" or stored_bytes < 0.4 * count
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path), "4", "--json"])
    sources = {leaf["path"]: leaf["source"] for leaf in json.loads(shown.output)["leaves"]}
    assert {sources[path] for path in PATHS} == {"stale, as step 1 had it"}
    assert "4 leaves stale" in CliRunner().invoke(app, ["verify", str(tmp_path)]).output


@pytest.mark.slow
def test_training_goes_on_from_a_stale_step_and_says_whose_residual_it_is(tmp_path):
    run, handler = run_of(mesh_of((2, 2)), max_deltas=6)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 3)
    state = assert_stale(tmp_path, run, saved, 3, 1)
    run, handler = run_of(mesh_of((2, 2)), max_deltas=6)
    with manager_of(tmp_path, handler) as manager:
        args = adacheck.RestoreArgs(abstract(run.state))
        run.state, run.count = manager.restore(3, args=args), 3
        assert_same_bits(run.state, support.host_copy(state))
        saved |= save_steps(manager, run, 5)
    found = [{*dict(step.manifest.stale).values()} for step in roots.steps_of(tmp_path)]
    assert found == [set(), *[{1}] * 6, set()]
    for step, since in ((4, 1), (7, 1), (8, 8)):
        assert_stale(tmp_path, run, saved, step, since)


@pytest.mark.slow
def test_bases_that_are_made_in_the_background_have_the_residual(tmp_path, monkeypatch):
    monkeypatch.setattr(line, "BEGINNING", Schedule(3, 1))
    policy = adacheck.AdaptivePolicy(most_deltas=3)
    run, handler = run_of(mesh_of((1,)), max_deltas=policy)
    saved = trained(tmp_path, run, handler, 9)
    found = {step.step: step.manifest for step in roots.steps_of(tmp_path)}
    made = [n for n, each in found.items() if isinstance(each, BaseManifest) and each.replaces]
    assert made == [4, 7]
    fresh = [n for n, each in found.items() if not each.stale]
    assert set(made) <= set(fresh)
    for step in found:
        since = max(each for each in fresh if each <= step)
        assert_stale(tmp_path, run, saved, step, since, mesh=mesh_of((1,)))


@pytest.mark.slow
def test_two_processes_leave_out_what_each_has_of_the_residual(tmp_path):
    root, out = tmp_path / "run", tmp_path / "out"
    launch("feedback", 2, root, out, devices=2)
    run, _ = run_of(mesh_of((2, 2)))
    saved = {}
    for step in range(1, 7):
        with np.load(f"{out}-saved{step}.npz") as arrays:
            saved[step] = [arrays[name] for name in arrays.files]
    letters = {pack.encodings for s in roots.steps_of(root)[1:-1] for pack in s.manifest.packs}
    assert any("c" in each for each in letters)
    for step, since, holder in ((2, 1, None), (3, 1, 4), (5, 1, None), (6, 6, None)):
        assert_stale(root, run, saved, step, since, holder, mesh_of((8,)))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["params/*"], "params/in/bias"),
        (["*/adacheck_record"], "adacheck_record"),
        (["*/no_such_leaf"], "no leaf"),
    ],
)
def test_leaves_that_cannot_be_ephemeral_are_refused(tmp_path, patterns, message):
    run, _ = run_of(mesh_of((1,)))
    handler = adacheck.AdaCheckHandler(run.recorder, params_path="params", ephemeral=patterns)
    with (
        manager_of(tmp_path, handler) as manager,
        pytest.raises(RecorderError, match=rf"ephemeral.*{message}"),
    ):
        manager.save(1, args=adacheck.SaveArgs(run.advance()))


def test_patterns_are_checked():
    with pytest.raises(ValueError, match="sequence of patterns"):
        adacheck.AdaCheckHandler(ephemeral="*/residual")
    with pytest.raises(ValueError, match=r"Shadow\(directory=...\)"):
        adacheck.AdaCheckHandler(
            ephemeral=["*/residual"], shadow=adacheck.Shadow(directory="/dev/shm/x")
        )
