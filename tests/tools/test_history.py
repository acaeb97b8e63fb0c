"""Looking back through a run: every recorded step, what changed, and where two runs part."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from adacheck_jax.cli.main import app
from adacheck_jax.tools.history import bisect as bisects
from adacheck_jax.tools.history import compare as compares
from adacheck_jax.tools.history import log as logs
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.steps import InputError
from tests.tools.small_run import STEPS, train, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory)


def in_tree(state: Any, path: str) -> Any:
    for name in path.split("/"):
        state = state[name] if isinstance(state, dict) else getattr(state, name, None)
    return state


@pytest.mark.slow
def test_every_recorded_step_is_restored_in_any_order(run):
    root, states = run
    with contextlib.closing(Walk(root)) as walk:
        for step in (3, 4, 5, 13, 0, 7, 6, 12):
            found, expected = walk.at(step).tree(), states[step]
            np.testing.assert_array_equal(found["params"]["b"], expected["params"]["b"])
            assert found["seen"] == step + 1


def test_a_damaged_step_is_refused_by_name_and_others_are_walked(run, tmp_path):
    root, states = run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    (copy / "9/default/adacheck/manifest.json").write_text("{}")
    walk = Walk(copy)
    assert walk.damaged.keys() == {9}
    assert invoked("inspect", copy, 9).exit_code == 1  # though a later step's directory may hold it
    assert walk.at(8).step == 8
    with pytest.raises(InputError, match="expected step 99"):
        walk.find(99)
    assert [walk.find(each).number for each in (-1, None, -2)] == [13, 13, 12]
    with pytest.raises(InputError, match="at least 99 steps"):
        walk.find(-99)
    for step in range(STEPS - 1):  # deleted ones are had from later ones
        shutil.rmtree(copy / str(step), ignore_errors=True)
    walk = Walk(copy)
    assert len(walk.steps) > 1
    assert walk.numbers[-1] == STEPS - 1
    for step in walk.steps:
        found, expected = walk.at(step).tree()["params"]["b"], states[step]["params"]["b"]
        np.testing.assert_array_equal(found, expected)


def test_a_copy_of_a_step_under_another_number_hides_no_step(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    shutil.rmtree(copy / "0")  # which later steps hold
    for number in (0, 20):
        shutil.copytree(copy / "13", copy / f"{number}")
    walk = Walk(copy)
    assert walk.numbers == list(range(STEPS))
    assert walk.find(13).folder == copy / "13"


def test_the_log_has_norms_rates_and_metrics(run):
    root, states = run
    report = logs.log(Walk(root))
    assert [each.step for each in report.steps] == list(range(STEPS))
    for each in report.steps:
        record = states[each.step]["opt"].adacheck_record
        expected = math.sqrt(
            sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(record))
        )
        assert each.gradient_norm == pytest.approx(expected, rel=1e-12)
        assert each.learning_rate == pytest.approx(1e-2)
        assert each.metrics == ({} if each.step in (3, 4) else {"loss": 1 / (each.step + 1)})
        if each.step:
            pairs = [jax.tree.leaves(states[s]["params"]) for s in (each.step, each.step - 1)]
            moved = [np.float64(a) - np.float64(b) for a, b in zip(*pairs, strict=True)]
            expected = math.sqrt(sum(float(np.sum(x**2)) for x in moved))
            assert each.update_norm == pytest.approx(expected, rel=1e-9)
    assert logs.log(Walk(root), last=3).steps == report.steps[-3:]


def test_the_difference_of_two_steps(run):
    root, states = run
    walk = Walk(root)
    assert not compares.compare_steps(walk, 5, walk, 5).differences
    assert walk.restored_count == 0  # equal by fingerprint
    found = compares.compare_steps(walk, 5, walk, 8)
    shown = [*dict.fromkeys(each.role for each in found.differences)]
    assert shown == ["params", "optimizer state", "other", "record"]  # each with all its leaves
    assert sum(a.role != b.role for a, b in itertools.pairwise(found.differences)) == 3
    by_path = {each.path: each for each in found.differences}
    each = by_path["params/a/kernel"]
    old, new = (np.float64(states[s]["params"]["a"]["kernel"]) for s in (5, 8))
    assert each.role == "params"
    assert each.norm == pytest.approx(float(np.linalg.norm(new - old)))
    assert each.largest == pytest.approx(float(np.abs(new - old).max()))
    cosine = float((old * new).sum() / np.linalg.norm(old) / np.linalg.norm(new))
    assert each.cosine == pytest.approx(cosine)
    assert each.changed_count == np.count_nonzero(old != new)
    assert by_path["seen"].first.before == "6"
    assert by_path["seen"].first.after == "9"
    assert not any("hyperparams/learning_rate" in path for path in by_path)


@pytest.mark.parametrize("target", [0, 1, 6, 13])
def test_bisect_finds_the_first_step_in_few_restores(run, target):
    walk = Walk(run[0])
    found = bisects.bisect(walk, lambda s: "so" if int(s.tree()["seen"]) > target else None)
    assert (found.step, found.says) == (target, "so")
    assert found.before == (target - 1 if target else None)
    assert found.restored_count <= 2 + math.ceil(math.log2(STEPS))
    if target == 0:
        found = bisects.bisect(Walk(run[0]), lambda _: None)
        assert (found.step, found.restored_count) == (None, 1)
        with pytest.raises(InputError, match="recorded steps from 50"):
            bisects.bisect(walk, lambda _: None, first=50)


FAULTS = [
    (6, "params/a/kernel", (2, 3), 5),
    (7, "opt/adacheck_inner/inner_state/0/nu/b", (4,), 22),
    (9, "gradient/a/kernel", (0, 5), 30),
    (12, "gradient/b", (1,), 0),
]


def invoked(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.covering(1, quick=2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f[1].replace("/", "."))
def test_compare_names_step_leaf_and_element_of_one_flipped_bit(run, tmp_path, fault):
    step, path, index, _bit = fault
    train(tmp_path / "other", fault)
    first, second = Walk(run[0]), Walk(tmp_path / "other")
    found = compares.compare_runs(first, second)
    assert (found.before[1], found.after[1], found.equal_until) == (step, step, step - 1)
    assert first.restored_count == second.restored_count == 1
    worst = found.differences[0]
    is_gradient = path.startswith("gradient/")
    name = f"opt/adacheck_record/{path.removeprefix('gradient/')}" if is_gradient else path
    assert worst.path == name
    assert (worst.first.index, worst.first.bits, worst.changed_count) == (index, 1, 1)
    assert worst.first.process == 0
    assert (worst.role == "record") == is_gradient
    shown = invoked("diff", run[0], tmp_path / "other")
    assert shown.exit_code == 1
    assert (
        f"Step {step} is the first of 14 common steps that differs; all until {step - 1} are"
        in (shown.output)
    )
    element = f"{[*index]}: {worst.first.before} -> {worst.first.after}, 1 bit, process 0"
    assert element in next(x for x in shown.output.splitlines() if x.startswith(name))


def test_equal_runs_are_equal(run, tmp_path):
    train(tmp_path / "other", deferred=())
    first = Walk(run[0])
    found = compares.compare_runs(first, Walk(tmp_path / "other"))
    assert (found.is_equal, found.compared_count, found.equal_until) == (True, STEPS, STEPS - 1)
    assert first.restored_count == 0


def test_what_is_replayed_alike_and_was_saved_otherwise_differs(run, monkeypatch):
    first, second = Walk(run[0]), Walk(run[0])
    own = second.fingerprints
    as_saved = lambda step: own(step) | ({"params/b": 0} if step >= 9 else {})  # noqa: E731
    monkeypatch.setattr(second, "fingerprints", as_saved)
    found = compares.compare_runs(first, second)
    assert (found.before[1], found.differences, found.alike) == (9, (), ("params/b",))
    assert not found.is_equal


COMMANDS = (
    ("log {root} --last 2", 0, ("learning rate", "loss", "the newest 2 of 14 recorded steps")),
    ("diff {root} 3 -1", 1, ("params/a/kernel",)),
    ("diff {root} latest -1", 0, ()),
    ("diff {root} 3 3 --other {root}", 0, ()),
    ("diff {root} {root}", 0, ("All 14 common steps are equal",)),
    ("bisect {root} --predicate {top}/checks.py:late", 0, ("Step 5 is the first", "seen 6")),
    ("bisect {root} --non-finite", 1, ("does not hold at step 13",)),
    (
        "bisect {root} --predicate {top}/checks.py:broken",
        2,
        ("step 13 the function raised Key",),
    ),
)


def test_the_commands(run, tmp_path):
    (tmp_path / "checks.py").write_text(
        "def late(state, step):\n    return f'seen {state[\"seen\"]}' if step >= 5 else ''\n"
        "def broken(state, step):\n    return state['nothing']\n"
    )
    for words, code, told in COMMANDS:
        shown = invoked(*words.format(root=run[0], top=tmp_path).split())
        assert shown.exit_code == code, shown.output
        assert all(each in shown.output for each in told), shown.output
    steps = json.loads(invoked("log", run[0], "--json").output)["steps"]
    assert [each["step"] for each in steps] == [*range(STEPS)]


def test_a_nan_is_named_by_leaf_and_element(run):
    state = Walk(run[0]).at(8)
    place = [leaf.path for leaf in state.leaves].index("params/b")
    broken = [np.array(array) for array in state.arrays]
    broken[place][3] = np.nan
    found = bisects.not_finite(dataclasses.replace(state, arrays=tuple(broken)))
    assert found == "params/b [3] is nan"
    assert bisects.not_finite(state) is None
