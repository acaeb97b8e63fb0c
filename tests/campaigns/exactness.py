"""How exactly each optimizer's steps come back, on the mesh they were saved on and on others.

    python -m tests.campaigns.exactness --steps 10
    python -m tests.campaigns.exactness --other-python /path/to/bin/python

A language model of about a million params (float32, bfloat16 compute) on the text of the standard
library, cut along both axes of a (4, 2) mesh of 8 virtual CPU devices. Every step is saved; the
last one is restored and compared with the live state, element by element, bit by bit. Meshes of
fewer devices are restored in processes that have no more: there the saving devices do not exist,
and what comes out of sums is right to rounding only. Where another interpreter is given, with
another release of JAX, it restores on all meshes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.restore.check import ROUNDING
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.update.recorder_state import RECORD_FIELD
from benchmarks.common import LanguageModel, new_bytes, tokens_of, words
from tests.campaigns import command

DEVICE_COUNT = 8
SAVING_MESH = (4, 2)
OTHER_MESH = (8, 1)
MESHES = (SAVING_MESH, OTHER_MESH, (2, 2), (1, 1))
MODEL = LanguageModel(width=256, layers=1, dtype=jnp.bfloat16)
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Case:
    """One optimizer, and how it is run.

    Attributes:
        name: for the table.
        tx: makes what the recorder wraps.
        dtype: of the record.
        separate: whether the update runs through ``adacheck.separate_update``.
        steered: whether the learning rate is set by hand from the middle of the run on.
        clipped_before: whether gradients are clipped before the recorder. Where they are clipped
            inside, the norm would else be 1 in every order of its sum.
    """

    name: str
    tx: Callable[[], optax.GradientTransformation]
    dtype: Any = None
    separate: bool = False
    steered: bool = False
    clipped_before: bool = True


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


_REDUCING = (
    Case("clip_by_global_norm + adamw", lambda: clipped(optax.adamw(1e-3)), clipped_before=False),
    Case("adafactor", lambda: optax.adafactor(1e-3)),
    Case("muon", lambda: optax.contrib.muon(2e-3)),
    Case("lamb", lambda: optax.lamb(2e-3)),
)
_ACCUMULATED = Case(
    "MultiSteps of clip_by_global_norm + adamw, fused",
    lambda: optax.MultiSteps(clipped(optax.adamw(1e-3)), 2).gradient_transformation(),
    clipped_before=False,
)
CASES = (
    Case("adamw", lambda: optax.adamw(1e-3)),
    Case("adamw, bfloat16 record", lambda: optax.adamw(1e-3), dtype=jnp.bfloat16),
    Case("lion", lambda: optax.lion(3e-4)),
    Case("sgd, momentum", lambda: optax.sgd(1e-2, momentum=0.9)),
    Case("schedule_free_adamw", lambda: optax.contrib.schedule_free_adamw(1e-3)),
    Case(
        "inject_hyperparams(adamw), rate set by hand",
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        steered=True,
    ),
    Case("adamw(mu_dtype=bfloat16)", lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16)),
    Case("adabelief", lambda: optax.adabelief(1e-3)),
    Case("rmsprop, momentum", lambda: optax.rmsprop(1e-3, momentum=0.9)),
    *(replace(case, name=f"{case.name}, fused") for case in _REDUCING),
    _ACCUMULATED,
    *(replace(c, name=f"{c.name}, separate_update", separate=True) for c in _REDUCING),
    Case(
        "clip_by_global_norm + adamw(mu_dtype=bfloat16), separate_update",
        lambda: clipped(optax.adamw(1e-3, mu_dtype=jnp.bfloat16)),
        separate=True,
        clipped_before=False,
    ),
    Case(
        "clip_by_global_norm + lion, separate_update",
        lambda: clipped(optax.lion(3e-4)),
        separate=True,
        clipped_before=False,
    ),
)


@dataclass(frozen=True)
class Restored:
    """What one restore gave, held against the live state.

    Attributes:
        mismatching: elements whose bits differ.
        relative: the largest difference relative to its leaf's largest absolute value.
        leaf: path of the leaf where that is.
        rounded: leaves that the handler said are right to rounding only.
        tolerance: what it said that they may be off by.
        error: why nothing was restored; empty otherwise.
    """

    mismatching: int
    relative: float
    leaf: str
    rounded: int
    tolerance: float
    error: str = ""


def mesh_of(shape: Sequence[int]) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(tuple(shape), ("data", "model"), (AxisType.Auto,) * 2, devices=devices)


def optimizer_of(case: Case) -> tuple[adacheck.Recorder, optax.GradientTransformation]:
    recorder = adacheck.Recorder(case.tx(), dtype=case.dtype)
    before = [optax.clip_by_global_norm(1.0)] if case.clipped_before else []
    return recorder, optax.chain(*before, recorder)


def initial_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}


def placed(tree: Any, mesh: Mesh) -> Any:
    """Shardings: matrices are cut along both axes, everything else is replicated."""

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, jax.P("data", "model") if leaf.ndim == 2 else jax.P())

    return jax.tree.map(sharding, tree)


def abstract_state(optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    params = jax.eval_shape(MODEL.initial)
    shapes = jax.eval_shape(lambda p: initial_state(optimizer, p), params)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        placed(shapes, mesh),
    )


@functools.cache
def initial_params() -> Any:
    return jax.device_get(jax.jit(MODEL.initial)())


@jax.jit
def gradients(params: Any, tokens: jax.Array) -> Any:
    """The gradients where the update runs apart; they come out cut like the params."""
    grads = jax.grad(MODEL.loss)(params, tokens)
    return jax.lax.with_sharding_constraint(grads, placed(grads, mesh_of(SAVING_MESH)))


def train_step_of(
    case: Case, optimizer: optax.GradientTransformation, shardings: Any
) -> Callable[[Any, Any], Any]:
    """The train step ``(state, tokens) -> state``, in one program or with the update apart."""

    def fused(state: Any, tokens: jax.Array) -> Any:
        grads = jax.grad(MODEL.loss)(state["params"], tokens)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    if not case.separate:
        return jax.jit(fused, donate_argnums=0, out_shardings=shardings)
    update = adacheck.separate_update(optimizer)

    def in_two(state: Any, tokens: jax.Array) -> Any:
        grads = gradients(state["params"], tokens)
        params, opt_state = update(grads, state["opt_state"], state["params"])
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    return in_two


def steered(state: Any, rate: float) -> Any:
    """The state with another learning rate among its injected hyper-parameters."""

    def put(path: Any, leaf: Any) -> Any:
        if not trees.leaf_path(path).endswith("hyperparams/learning_rate"):
            return leaf
        return jax.device_put(jnp.asarray(rate, leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(put, state)


def trained(case: Case, root: Path, steps: int) -> None:
    """Trains, saves every step, and leaves the bits of the last state beside the steps."""
    recorder, optimizer = optimizer_of(case)
    mesh = mesh_of(SAVING_MESH)
    state = initial_state(optimizer, initial_params())
    shardings = placed(jax.tree.map(jnp.asarray, state), mesh)
    state = jax.device_put(state, shardings)
    train_step = train_step_of(case, optimizer, shardings)
    data = NamedSharding(mesh, jax.P("data"))
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=steps)
    with ocp.CheckpointManager(root / "steps", item_handlers=handler) as manager:
        for step in range(1, steps + 1):
            if case.steered and step > steps // 2:
                state = steered(state, 1e-3 / step)
            state = train_step(state, jax.device_put(tokens_of(step), data))
            manager.save(step, args=adacheck.SaveArgs(state))
    bits = {path: words(leaf) for path, leaf in compared(state).items()}
    np.savez(root / "live.npz", allow_pickle=False, **bits)


def compared(state: Any) -> dict[str, Any]:
    """Every leaf but the record, which deltas store as it is."""
    leaves, _ = trees.flatten(state)
    return {path: leaf for path, leaf in leaves.items() if RECORD_FIELD not in path.split("/")}


def restored(case: Case, root: Path, step: int, shape: Sequence[int]) -> Restored:
    """Restores one step onto a mesh, without the recorder, and compares it with the live state."""
    _, optimizer = optimizer_of(case)
    abstract = abstract_state(optimizer, mesh_of(shape))
    handler = adacheck.AdaCheckHandler()
    with ocp.CheckpointManager(root / "steps", item_handlers=handler) as manager:
        try:
            state = manager.restore(step, args=adacheck.RestoreArgs(abstract))
        except adacheck.AdaCheckError as error:
            return Restored(0, 0.0, "", 0, 0.0, f"{type(error).__name__}: {error}")
    info = handler.restored
    assert info is not None
    mismatching, worst, worst_leaf = 0, 0.0, ""
    with np.load(root / "live.npz") as live:
        for path, leaf in compared(state).items():
            found, bits = np.asarray(leaf), live[path]
            mismatching += int((words(found) != bits).sum())
            relative = relative_difference(found, bits.view(found.dtype).reshape(found.shape))
            if relative > worst:
                worst, worst_leaf = relative, path
    return Restored(mismatching, worst, worst_leaf, len(info.rounded), info.tolerance)


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest absolute value that is expected."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    largest = float(np.abs(b).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / largest if largest else 0.0


def saved(case: Case, root: Path) -> dict[str, Any]:
    """What the manifests say about a run: classes of leaves, kinds of steps, bytes a delta."""
    directories = sorted((root / "steps").glob("[0-9]*"), key=lambda path: int(path.name))
    kinds = dict.fromkeys(("bases", "replayed", "bits"), 0)
    delta_bytes: list[int] = []
    classes = dict.fromkeys(("element_wise", "reducing", "passed"), 0)
    whole: set[int] = set()
    for directory in directories:
        manifest = manifest_file.read(directory / "default")
        if isinstance(manifest, BaseManifest):
            kinds["bases"] += 1
            update = manifest.update
            assert update is not None
            reducing, passed = frozenset(update.reducing), frozenset(update.passed)
            classes["reducing"], classes["passed"] = len(reducing), len(passed)
            classes["element_wise"] = len(update.explained - reducing - passed)
        else:
            assert isinstance(manifest, DeltaManifest)
            kinds["replayed" if manifest.has_update else "bits"] += 1
            delta_bytes.append(new_bytes(directory))
            whole |= frozenset(manifest.unreplayed)
    with np.load(root / "live.npz") as live:
        elements = sum(live[path].size for path in live.files)
    return {
        "optimizer": case.name,
        "elements": elements,
        "classes": classes,
        "kinds": kinds,
        "unreplayed_leaves": len(whole),
        "delta_bytes": int(statistics.median(delta_bytes)) if delta_bytes else None,
    }


def name_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def start_child(root: Path, step: int, shape: Sequence[int], python: str) -> subprocess.Popen[str]:
    """Restores every case of a root in a process that has the mesh's devices and no others."""
    flags = re.sub(rf"{_DEVICES_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    command = [python, "-m", "tests.campaigns.exactness", "--restore-from", str(root)]
    command += ["--steps", str(step), "--mesh", name_of(shape)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags},
    )


def restore_all(root: Path, step: int, shape: Sequence[int]) -> list[Restored]:
    roots = [(case, root / str(i)) for i, case in enumerate(CASES)]
    return [restored(case, each, step, shape) for case, each in roots if each.exists()]


def run(steps: int, root: Path, only: str = "", other_python: str = "") -> dict[str, Any]:
    """Trains each case, restores it on all meshes, and gives what the table tells."""
    in_process = () if other_python else (SAVING_MESH, OTHER_MESH)
    rows: list[dict[str, Any]] = []
    for i, case in enumerate(CASES):
        if not re.search(only, case.name):
            continue
        case_root = root / str(i)
        case_root.mkdir()
        trained(case, case_root, steps)
        here = {
            name_of(shape): asdict(restored(case, case_root, steps, shape)) for shape in in_process
        }
        rows.append({**saved(case, case_root), "restored": here})
    python = other_python or sys.executable
    in_children = [each for each in MESHES if each not in in_process]
    children = [(name_of(shape), start_child(root, steps, shape, python)) for shape in in_children]
    for name, child in children:
        output, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"the process for mesh {name} ended with {child.returncode}")
        for row, each in zip(rows, json.loads(output.splitlines()[-1]), strict=True):
            row["restored"][name] = each
    params = jax.eval_shape(MODEL.initial)
    return {
        "params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "steps": steps,
        "rounding": ROUNDING,
        "cases": rows,
    }


def cell(each: dict[str, Any]) -> str:
    if each["error"]:
        return f"refused ({each['error'].split(':', maxsplit=1)[0]})"
    if not each["mismatching"]:
        return "0"
    return f"{each['mismatching']:,} (≤ {each['relative']:.1e})"


def table(result: dict[str, Any]) -> str:
    """A Markdown table of mismatching elements, with the largest relative difference."""
    head = [
        *("optimizer", "leaves: element-wise / reducing / passed", "deltas kept as"),
        *("bytes a delta", "elements", name_of(SAVING_MESH), name_of(OTHER_MESH)),
        *("4 devices, 2x2", "1 device"),
    ]
    rows = []
    for row in result["cases"]:
        classes, kinds = row["classes"], row["kinds"]
        kept = [f"{kinds[kind]} {kind}" for kind in ("replayed", "bits") if kinds[kind]]
        if kinds["bases"] > 1:
            kept.append(f"{kinds['bases'] - 1} more bases")
        if row["unreplayed_leaves"]:
            kept.append(f"{row['unreplayed_leaves']} leaves stored")
        found = [row["restored"][name_of(s)] for s in MESHES]
        size = "–" if row["delta_bytes"] is None else f"{row['delta_bytes']:,}"
        cells = [
            row["optimizer"],
            " / ".join(str(classes[key]) for key in ("element_wise", "reducing", "passed")),
            ", ".join(kept),
            size,
            f"{row['elements']:,}",
            *map(cell, found),
        ]
        rows.append(cells)
    return command.table(head, rows)


def refusals(result: dict[str, Any]) -> list[str]:
    """One line for each restore that gave nothing."""
    return [
        f"Refused: {row['optimizer']}, {mesh}: {each['error']}"
        for row in result["cases"]
        for mesh, each in row["restored"].items()
        if each["error"]
    ]


def rounding_line(result: dict[str, Any]) -> str:
    """The largest measured difference beside what the handler allowed for."""
    found = [
        (each["relative"] / each["tolerance"], row["optimizer"], mesh, each)
        for row in result["cases"]
        for mesh, each in row["restored"].items()
        if each["rounded"]
    ]
    if not found:
        return "No leaf was restored to rounding only."
    share, optimizer, mesh, each = max(found, key=lambda item: item[0])
    return (
        f"Largest difference where leaves are right to rounding only: {each['relative']:.1e} of "
        f"the leaf's largest value ({optimizer}, {mesh}, {each['leaf']}), {share:.2f} of the "
        f"tolerance that the handler states ({each['tolerance']:.0e}: {result['rounding']:.0e} an "
        "update, and one rounding)."
    )


def main() -> int:
    """Reads the command line, and prints a table."""
    parser = command.parser(__doc__, json=False)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="expression that names of optimizers match")
    parser.add_argument("--other-python", default="", help="the interpreter that restores")
    parser.add_argument("--restore-from", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mesh", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = tuple(map(int, (arguments.mesh or name_of(SAVING_MESH)).split("x")))
    if _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):  # before JAX is asked for devices
        count = int(np.prod(shape)) if arguments.restore_from else DEVICE_COUNT
        jax.config.update("jax_num_cpu_devices", count)
    if arguments.restore_from:
        found = restore_all(arguments.restore_from, arguments.steps, shape)
        print(json.dumps([asdict(each) for each in found]))
        return 0
    with tempfile.TemporaryDirectory() as root:
        result = run(arguments.steps, Path(root), arguments.only, arguments.other_python)
    told = [table(result), *refusals(result), rounding_line(result)]
    return command.finish(result, text="" if arguments.json else "\n\n".join(told))


if __name__ == "__main__":
    sys.exit(main())
