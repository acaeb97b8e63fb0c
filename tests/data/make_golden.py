"""Write roots of the current format version, which every later release has to read.

    python -m tests.data.make_golden [NAME ...]

makes ``tests/data/vN``: each root in one archive, and beside it the bits of every step, deferred
ones included. Of some names it makes those alone, and keeps the other roots. A version that is
released is never made again.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.manifest_json import FORMAT_VERSION
from adacheck_jax.update.recorder_state import PASSED_FIELD
from tests import support

DATA = Path(__file__).parent


def adam() -> optax.GradientTransformation:
    return optax.adam(0.05)


def adamw() -> optax.GradientTransformation:
    return optax.adamw(0.05)


def injected_adamw() -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.adamw)(0.05)


@dataclass(frozen=True)
class Golden:
    """One root of an earlier or the current release.

    Attributes:
        version: format version of its manifests.
        name: directory of the root in its archive, and name of the file of bits.
        optimizer: makes the optimizer that is recorded.
        saved: numbers of the steps that the manager lists; the others are deferred steps.
        kinds: kind of each listed step: base, replayed delta, or bit-pattern delta.
        delta: of the handler.
        steered: step before which the learning rate was set by hand, if any.
        compacted: step that was compacted before the next one was saved, if any.
        moved: step before which the run was restored on two devices; it began on four then.
        width: columns of the params; of many the largest gradients alone are recorded, and the
            others are kept in an ephemeral leaf.
    """

    version: int
    name: str
    optimizer: Callable[[], optax.GradientTransformation]
    saved: tuple[int, ...]
    kinds: str
    delta: str = "auto"
    steered: int | None = None
    compacted: int | None = None
    moved: int | None = None
    width: int = 6

    def __str__(self) -> str:
        return f"v{self.version}-{self.name}"

    @property
    def directory(self) -> Path:
        """The folder of the golden roots of its version."""
        return DATA / f"v{self.version}"

    def recorder(self) -> adacheck.Recorder:
        return adacheck.Recorder(self.optimizer())

    def bits(self) -> dict[int, np.ndarray]:
        """The bits of every step, deferred ones included, as :func:`bits_of` gives them."""
        with np.load(self.directory / f"{self.name}.npz") as arrays:
            return {int(step): arrays[step] for step in arrays.files}


# Of version 6 params were clamped after each update (stored whole, then as differences).
GOLDEN = (
    Golden(6, "clamped", adam, (1, 2, 3, 4), "BRRR"),
    Golden(6, "replayed", injected_adamw, (1, 2, 3, 6), "BRRR", steered=3),
    Golden(7, "adamw", adamw, (1, 2, 3, 6), "BRRR"),
    Golden(7, "bits", adamw, (1, 2, 3, 4), "BDDD", delta="bits"),
    Golden(7, "replayed", injected_adamw, (1, 2, 3, 6), "BRRR", steered=3),
    Golden(7, "compacted", adamw, (1, 2, 3, 4, 6), "BRBRR", compacted=3),
    Golden(8, "bits", adamw, (1, 2, 3, 4), "BDDD", delta="bits"),
    Golden(8, "replayed", injected_adamw, (1, 2, 3, 6), "BRRR", steered=3),
    Golden(8, "coded", adamw, (1, 2, 3, 4, 6), "BRBRR", compacted=3, width=200),
    Golden(9, "bits", adamw, (1, 2, 3, 4), "BDDD", delta="bits", moved=3),
    Golden(9, "replayed", adamw, (1, 2, 4, 5), "BRRR", moved=3),
    Golden(9, "compacted", adamw, (1, 2, 3, 4, 5), "BRRBR", compacted=4, moved=3),
)


def initial_state(recorder: adacheck.Recorder, width: int = 6) -> Any:
    params = {"w": jnp.zeros((4, width)), "b": jnp.zeros(width)}
    state = {"params": params, "opt_state": recorder.init(params), "step": jnp.int32(0)}
    return state if width == 6 else {**state, "residual": jnp.zeros((4, width))}


def train_step(recorder: adacheck.Recorder) -> Callable[[Any], Any]:
    def step(state: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = jnp.sin(jnp.arange(8.0).reshape(2, 4) + state["step"])
            wanted = jnp.cos(jnp.arange(params["b"].size) * 1.7) if "residual" in state else 1.0
            return jnp.mean((x @ params["w"] + params["b"] - wanted) ** 2)

        grads, rest = jax.grad(loss)(state["params"]), {}
        if "residual" in state:
            whole = grads["w"] + state["residual"]
            least = jax.lax.top_k(jnp.abs(whole).reshape(-1), whole.size // 20)[0][-1]
            grads["w"] = jnp.where(jnp.abs(whole) >= least, whole, 0)
            rest = {"residual": whole - grads["w"]}
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1, **rest}

    return jax.jit(step)


def bits_of(state: Any, version: int) -> np.ndarray:
    """All bits of a state, without the leaves that recorders of its version did not have."""
    named, _ = trees.flatten(state)
    kept = [x for path, x in named.items() if version > 6 or PASSED_FIELD not in path]
    return np.concatenate([np.asarray(x).reshape(-1).view(np.uint32) for x in kept])


def make(golden: Golden, root: Path) -> dict[int, np.ndarray]:
    """Trains and saves one root.

    Returns:
        The bits of every step.
    """
    end, bits = golden.saved[-1] + 1, {}
    if golden.moved is None:
        return _continue(golden, root, range(1, end), 1)
    for steps, count in ((range(1, golden.moved), 4), (range(golden.moved, end), 2)):
        bits |= _continue(golden, root, steps, count)
    return bits


def _continue(
    golden: Golden, root: Path, steps: Sequence[int], device_count: int
) -> dict[int, np.ndarray]:
    """Goes on with a run, if it has begun, on so many devices."""
    recorder, mesh = golden.recorder(), support.mesh_of((device_count,))
    step, state, bits = train_step(recorder), initial_state(recorder, golden.width), {}
    handler = adacheck.AdaCheckHandler(
        recorder,
        delta=golden.delta,  # pyright: ignore[reportArgumentType]
        ephemeral=["residual"] if "residual" in state else [],
    )
    kept = {}
    with support.manager_of(root, handler) as manager:
        if (newest := manager.latest_step()) is not None:
            target = support.abstract(state, mesh)
            state = manager.restore(newest, args=adacheck.RestoreArgs(target))
        for number in steps:
            if number == golden.steered:
                rate = jnp.float32(0.02)
                state["opt_state"] = optax.tree_utils.tree_set(
                    state["opt_state"], learning_rate=rate
                )
            state = jax.block_until_ready(support.place(step(state), mesh))
            kept = kept or {k: v for k, v in state.items() if k == "residual"}
            bits[number] = bits_of({**state, **kept}, golden.version)
            if number in golden.saved:
                manager.save(number, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
                if number == golden.compacted:
                    support.compact(root, number)
            else:
                assert handler.record_step(state, number)
    return bits


def unpack(directory: Path, where: Path) -> None:
    """Unpacks the roots of one version."""
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 has none
    with tarfile.open(directory / "steps.tar.xz") as archive:
        archive.extractall(where, **safe)


def main(names: Sequence[str] = ()) -> None:
    """Makes roots of the current version: those of some names, or all."""
    every = [each for each in GOLDEN if each.version == FORMAT_VERSION]
    made = [each for each in every if each.name in names or not names]
    directory = every[0].directory
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, io.BytesIO() as archive:
        kept = [each.name for each in every if each not in made]
        if kept:
            unpack(directory, Path(work))
        with tarfile.open(fileobj=archive, mode="w:xz") as tar:
            for name in kept:
                tar.add(Path(work, name), name, filter=_anonymous)
            for golden in made:
                root = Path(work, golden.name)
                bits = make(golden, root)
                arrays: dict[str, Any] = {str(step): each for step, each in bits.items()}
                np.savez_compressed(directory / f"{golden.name}.npz", **arrays)
                tar.add(root, golden.name, filter=_anonymous)
        (directory / "steps.tar.xz").write_bytes(archive.getvalue())


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file without its owner."""
    return member.replace(uid=0, gid=0, uname="", gname="", deep=False)


if __name__ == "__main__":
    main(sys.argv[1:])
