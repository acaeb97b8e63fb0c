"""The benchmarks run, and say what they measured; nothing here looks at how long anything took."""

import importlib
import json
import os
import tempfile
from pathlib import Path

import pytest

from benchmarks import accelerator, many_leaves
from benchmarks.speed import child, report, ways
from tests import processes

ABOUT = {"command": "python -m benchmarks", "cores": 2, "machine": "x", "versions": {"jax": "1"}}
COST = {
    "blocking_s": 0.01,
    "durable_s": 0.2,
    "cpu_s": 0.1,
    "new_bytes": 2e6,
    "peak_bytes": 1e6,
}
KEPT = {"blocking_s": 0.0015, "median_blocking_s": 0.001, "step_s": 0.02, "cpu_s": 0.008}
COMPARED = [ways.DELTA, ways.BASE, ways.STOCK, ways.STATE_FILE, ways.DELTA_FILE, ways.FLOOR]


def measured(module, *, devices=1, **arguments):
    """In a fork: each new process would import JAX."""
    environment = {
        **os.environ,
        "XLA_FLAGS": (
            f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        ),
    }
    with tempfile.TemporaryDirectory() as root:
        given = json.dumps({"root": root, **arguments})
        run = processes.forked("benchmarks.speed.child", module, given, environment=environment)
        (said,) = processes.outputs([run])
    return json.loads(next(x for x in reversed(said.splitlines()) if x.startswith(("{", "["))))


@pytest.fixture(scope="module")
def saves():
    """A tiny state, saved in every way that the report tells of."""
    return measured("saves", params=20_000, leaves=2, rounds=1, saves=1, only=COMPARED)


@pytest.mark.slow
def test_every_way_saves(saves):
    assert [*saves["costs"]] == COMPARED
    assert all(cost["durable_s"] >= cost["blocking_s"] > 0 for cost in saves["costs"].values())
    new_bytes = {name: cost["new_bytes"] for name, cost in saves["costs"].items()}
    assert new_bytes[ways.DELTA_FILE] == saves["record_bytes"]
    assert new_bytes[ways.STATE_FILE] == saves["state_bytes"]
    assert 0 < new_bytes[ways.DELTA] < new_bytes[ways.BASE]


@pytest.mark.slow
def test_every_way_keeps_every_step():
    found = measured("recording", params=2000, leaves=2, steps=8, rounds=1, every=4)
    assert found["every"] == 4
    assert len(found["rows"]) == 5
    assert all(row["step_s"] > row["blocking_s"] > 0 for row in found["rows"].values())


@pytest.mark.slow
def test_object_stores_are_measured_beside_stock_orbax():
    size = {"params": 10_000, "leaves": 2, "saves": 3}
    found = measured("stores", kind="gs", delay_ms=0, **size)["rows"]
    assert found["delta"]["own_requests"] == 5, "and one that lists its lineage"
    assert found["delta"]["requests"] > 6
    assert found["stock Orbax"]["own_requests"] == 0
    assert found["stock Orbax's restore"]["received_bytes"] > 10_000


@pytest.mark.slow
def test_fingerprints_are_measured_with_and_without_the_call():
    found = measured("fingerprints", devices=2, params=2000, leaves=4, rounds=6)
    assert len(found["rows"]) == 3
    for row in found["rows"].values():
        assert [*row] == ["durable_s", "cpu_s", "record_s"]


@pytest.mark.slow
def test_a_measurement_that_fails_says_why():
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'parms'"):
        child.measure("saves", parms=1)


@pytest.mark.slow
def test_a_report_tells_everything_that_was_measured(saves, tmp_path):
    restores = [
        {"deltas": n, "restore_s": 1.2, "stock_s": 0.5, "read_s": 0.1, "updates_s": 0.4}
        | {"peak_bytes": 5e6}
        for n in (0, 10)
    ]
    step = {"step_s": 0.1, "longest_s": 0.15}
    results = {
        "about": ABOUT,
        "saves": saves,
        "restores": {"state_bytes": 1e6, "rows": restores},
        "training": {
            "state_bytes": 1e6,
            "rows": {"nothing saved": step, "every step": {**step, "step_s": 0.125}},
        },
        "recording": [{"state_bytes": 1e6, "every": 20, "rows": {"recorded": KEPT}}],
        "fingerprints": [
            {"devices": 8, "leaves": 102, "state_bytes": 1e6}
            | {"rows": {"as it is": {"durable_s": {"median": 0.1, "ratio": 1.0}}}}
        ],
        "growth": [{"of": "devices", "at": n, "costs": {ways.DELTA: COST}} for n in (1, 4)],
    }
    text = report.markdown(json.loads(json.dumps(results)))
    assert f"`{ABOUT['command']}`: 2 cores (x), jax 1; seed 0." in text
    assert "| 10 | 1,200 | 1,000 = 500 + 100 + 400 | 1.20 | 5.00 |" in text
    assert "| every step | 125 | 25 % | 150 |" in text
    assert "| 1.00 MB | recorded | 1.5 | 1.0 | 20.0 | 8.0 |" in text
    assert "| 8 | as it is | 100 (1.00) |" in text
    assert "| devices | 4 | delta | 10.0 | 200 | 100 | 2.00 |" in text
    for name in COMPARED:
        assert f"| {name} |" in text
    pytest.importorskip("matplotlib")
    drawn = report.plots(results, tmp_path)
    assert {path.name for path in drawn} == {"saves.png", "restores.png", "growth.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.campaign
def test_states_of_many_leaves_are_measured_beside_stock_orbax(monkeypatch):
    monkeypatch.setattr(child, "measure", measured)
    rows = many_leaves.measured(6)
    assert len(rows) == 10
    assert all(
        durable_s >= blocking_s > 0 for row in rows.values() for blocking_s, durable_s, _ in row
    )
    assert many_leaves.lines(6, rows).count("| 6 | first") == 4


@pytest.mark.campaign
def test_an_accelerator_is_tried_in_minutes(monkeypatch):
    """Here on the devices that there are."""
    chosen = {"adamw": accelerator.OPTIMIZERS["adamw"]}
    monkeypatch.setattr(accelerator, "OPTIMIZERS", chosen)
    result = accelerator.measured([0.001], 5, leaves=2, params=2000)
    assert not result["left_out"]
    assert [row["optimizer"] for row in result["exactness"]] == [*chosen]
    for row in result["exactness"]:
        assert row["kind"] == "delta"
        assert (row["elements that differ"], row["error"]) == (0, "")
        assert row["on the host"] == "exact"
    assert result["saves of 0.001 GB"]["delta: blocking_ms"] > 0
    table = accelerator.markdown(result)
    assert "| adamw | delta | full | 0 | exact |" in table
    assert accelerator.measured([0.001], 0, leaves=2, params=2000)["left_out"]


def test_all_modules_of_the_benchmarks_find_what_they_measure():
    root = Path(accelerator.__file__).parent
    names = [path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")]
    modules = [".".join(["benchmarks", *name]) for name in names if name[-1] != "__main__"]
    for name in modules:
        importlib.import_module(name.removesuffix(".__init__"))
    assert len(modules) > 20
