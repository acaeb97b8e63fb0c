"""A tiny training run on any mesh, in the forms that users write it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax._src import lru_cache
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.adapter.restoring.restorer import StepRestorer
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.format.encodings.planes import word_bytes
from adacheck_jax.format.encodings.table import ENCODINGS
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store import volumes
from adacheck_jax.store.compaction import in_place, new_base
from adacheck_jax.store.packs import arrays, reader, writer
from adacheck_jax.store.steps import folders, lineage, roots
from adacheck_jax.store.storage.location import located

WIDTH = (
    64  # every shard stays at least 16 wide: narrower ones XLA:CPU of jax 0.12 compiles otherwise
)

SHADOWS = {"auto": adacheck.Shadow(), "sample": None, "full": adacheck.Shadow(on_devices=True)}
"""Settings of the shadow by what they have compared."""


def compile_once(directory: Path) -> None:
    """Lets processes, and handlers, find what others have compiled, where no place is given yet.

    Whoever is killed while it keeps a program leaves no part of it behind.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = _put


def _put(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    path = cache.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if not path.exists():
        part = cache.path / f"{key}.{os.getpid()}"
        part.write_bytes(value)
        part.rename(path)


def mesh_of(shape: tuple[int, ...], axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    names = ("data", "model")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)


def initial_params() -> dict[str, Any]:
    rng = np.random.default_rng(7)  # nothing to compile
    shapes = {"in": (WIDTH, 2 * WIDTH), "out": (2 * WIDTH, WIDTH)}
    kernels = {
        name: jnp.asarray(0.2 * rng.standard_normal(shape, np.float32))
        for name, shape in shapes.items()
    }
    return {
        "in": {"kernel": kernels["in"], "bias": jnp.zeros(2 * WIDTH)},
        "out": {"kernel": kernels["out"]},
        "scale": jnp.ones(()),
    }


def forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    mesh = jax.typeof(params["scale"]).sharding.mesh
    if mesh.are_all_axes_explicit:  # gather to multiply
        whole = NamedSharding(mesh, PartitionSpec())
        params = jax.tree.map(lambda p: jax.sharding.reshard(p, whole), params)
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return hidden @ params["out"]["kernel"] * params["scale"]


def shardings_of(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Matrices cut along every mesh axis, everything else replicated."""

    def sharding(leaf: Any) -> NamedSharding:
        axes = mesh.axis_names if getattr(leaf, "ndim", 0) == 2 else ()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


def place(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.device_put(tree, shardings_of(tree, mesh))


def abstract(tree: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    """The abstract state of a tree, on its own shardings or on another mesh."""
    shardings = (
        jax.tree.map(lambda x: x.sharding, tree) if mesh is None else shardings_of(tree, mesh)
    )
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(step)
    x, y = rng.standard_normal((2, 16, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


def recorded(
    tx: optax.GradientTransformation | None = None, dtype: Any = None
) -> tuple[adacheck.Recorder, optax.GradientTransformation]:
    recorder = adacheck.Recorder(optax.adamw(1e-2) if tx is None else tx, dtype=dtype)
    return recorder, optax.chain(optax.clip_by_global_norm(1.0), recorder)


@dataclass
class Run:
    """A training run whose every state can be asked for again."""

    recorder: adacheck.Recorder
    state: Any
    train_step: Callable[[Any, Any], Any]
    count: int = 0

    def advance(self) -> Any:
        """One donating train step: the former state's buffers are gone afterwards."""
        self.state = self.train_step(self.state, batch(self.count))
        self.count += 1
        return self.state


@dataclass(frozen=True)
class Program:
    """What a run is made of; the usual ones are shared by tests, so that each is compiled once."""

    recorder: adacheck.Recorder
    begin: Callable[[], Any]
    train_step: Callable[[Any, Any], Any]

    @classmethod
    def of(
        cls,
        recorder: adacheck.Recorder,
        begin: Callable[[], Any],
        train_step: Callable[[Any, Any], Any],
    ) -> Program:
        """A program whose train step keeps the shardings of its state, and donates it."""
        shardings = jax.tree.map(lambda x: x.sharding, begin())
        return cls(recorder, begin, jax.jit(train_step, donate_argnums=0, out_shardings=shardings))

    def run(self) -> Run:
        return Run(self.recorder, self.begin(), self.train_step)


def dict_run(
    mesh: jax.sharding.Mesh, tx: optax.GradientTransformation | None = None, dtype: Any = None
) -> Run:
    return (_usual_dict_program(mesh, dtype) if tx is None else dict_program(mesh, tx, dtype)).run()


def dict_program(
    mesh: jax.sharding.Mesh, tx: optax.GradientTransformation | None = None, dtype: Any = None
) -> Program:
    return program_of(mesh, *recorded(tx, dtype))


def program_of(
    mesh: jax.sharding.Mesh,
    recorder: adacheck.Recorder,
    chain: Any = None,
    *,
    params: Any = None,
    more: Any = None,
    follow: Callable[[Any, Any], Any] = lambda before, after: {},
    takes_value: bool = False,
    computed_in: Any = jnp.float32,
) -> Program:
    """A program whose state is a dictionary, on a mesh.

    Args:
        chain: the optimizer that the recorder is part of; None for the recorder alone.
        params: those that it begins with; None for the usual ones.
        more: further leaves of the state, by name.
        follow: gives those of them that change, from the state before and the one after.
        takes_value: whether the optimizer takes the loss.
        computed_in: data type in which the model computes.
    """
    chain = recorder if chain is None else chain
    wide = lambda tree: jax.tree.map(lambda x: x.astype(computed_in), tree)  # noqa: E731

    def begin() -> Any:
        first = initial_params() if params is None else jax.tree.map(jnp.array, params)
        copied = lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x  # noqa: E731
        state = {"params": first, "opt_state": chain.init(first), "step": jnp.int32(0)}
        return place(state | jax.tree.map(copied, more or {}), mesh)

    def train_step(state: Any, data: Any) -> Any:
        x, y = wide(data)
        loss_of = lambda p: jnp.mean((forward(wide(p), x) - y) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        extra = {"value": loss + state["step"]} if takes_value else {}
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"], **extra)
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return {**state, **after, **follow(state, after)}

    return Program.of(recorder, begin, train_step)


@functools.cache
def _usual_dict_program(mesh: jax.sharding.Mesh, dtype: Any) -> Program:
    return dict_program(mesh, None, dtype)


def linen_run(mesh: jax.sharding.Mesh) -> Run:
    return _linen_program(mesh).run()


@functools.cache
def _linen_program(mesh: jax.sharding.Mesh) -> Program:
    recorder, chain = recorded(dtype=jnp.bfloat16)

    def begin() -> TrainState:
        state = TrainState.create(apply_fn=forward, params=initial_params(), tx=chain)
        return place(state, mesh)

    def train_step(state: TrainState, data: Any) -> TrainState:
        x, y = data
        grads = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    return Program.of(recorder, begin, train_step)


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(jnp.tanh(self.norm(self.hidden(x)))))


def nnx_run(mesh: jax.sharding.Mesh) -> Run:
    """Batch statistics and dropout keys are leaves that no update explains."""
    return _nnx_program(mesh).run()


@functools.cache
def _nnx_program(mesh: jax.sharding.Mesh) -> Program:
    recorder, chain = recorded()
    model = _Model(nnx.Rngs(0))
    graph, first = nnx.split((model, nnx.Optimizer(model, chain, wrt=nnx.Param)))

    def begin() -> Any:
        return place(jax.tree.map(jnp.copy, first), mesh)

    def train_step(state: Any, data: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        x, y = data
        grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return Program.of(recorder, begin, train_step)


def host_copy(tree: Any) -> list[np.ndarray]:
    return [np.array(_plain(leaf)) for leaf in jax.tree.leaves(tree)]


def _plain(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_same_bits(found: Any, expected: list[np.ndarray]) -> None:
    copies = host_copy(found)
    assert len(copies) == len(expected)
    for a, b in zip(copies, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def manager_of(root: Any, handler: Any, **options: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        root, item_handlers=handler, options=ocp.CheckpointManagerOptions(**options)
    )


def copied(root: Path, target: Path) -> Path:
    """A copy to be changed, in which what was hard-linked is so again."""
    subprocess.run(["cp", "-a", root, target], check=True)
    return target


def save_steps(manager: Any, run: Run, steps: int) -> dict[int, list[np.ndarray]]:
    """Trains and saves every step; returns what each saved state was."""
    saved = {}
    for _ in range(steps):
        run.advance()
        saved[run.count] = host_copy(run.state)
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
    manager.wait_until_finished()
    return saved


def saved_run(
    root: Any, steps: int, shape: tuple[int, ...] = (4, 2), **options: Any
) -> tuple[Run, dict[int, list[np.ndarray]]]:
    """A run of which a handler with these options saved every step, and what each one was."""
    run = dict_run(mesh_of(shape))
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder, **options)) as manager:
        return run, save_steps(manager, run, steps)


def restored(root: Any, step: int, target: Any = None, /, **options: Any) -> Any:
    """A step as a process restores it that knows no recorder."""
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        return manager.restore(step, args=adacheck.RestoreArgs(target, **options))


def assert_steps(
    root: Any, saved: dict[int, list[np.ndarray]], state: Any, *shapes: tuple[int, ...]
) -> None:
    """A process that knows no recorder restores the steps, and those alone are listed."""
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        assert [*manager.all_steps()] == sorted(saved)
        for mesh in map(mesh_of, shapes) if shapes else [None]:
            args = adacheck.RestoreArgs(abstract(state, mesh))
            for step, expected in saved.items():
                assert_same_bits(manager.restore(step, args=args), expected)


def kinds_of(root: Any, *item: str) -> str:
    """A letter for each step, as it lies on disk: Base, or Delta."""
    found = roots.steps_of(located(str(root)), *item)
    return "".join(type(each.manifest).__name__[0] for each in found)


@contextlib.contextmanager
def without_links() -> Iterator[None]:
    """A file system that has no hard links."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        yield


def filled(size_bytes, blocks):
    """The bytes of an array: of blocks where they start, and zeros between them."""
    data = np.zeros(size_bytes, np.uint8)
    for start, block in blocks:
        data[start : start + block.nbytes] = np.frombuffer(block.tobytes(), np.uint8)
    return data


def encoded(encoding, new, old=None):
    """Bytes of a block in both arrays of a pack, in any encoding."""
    if (how := ENCODINGS[encoding]).has_own_size:
        code = how.code(new)
        return code.body, code.rest
    parts = how.parts(new.nbytes, word_bytes(new.dtype), None)
    low, high = (np.empty(n, np.uint8) for n in (parts.raw_bytes, parts.compressed_bytes))
    how.encode(new, old, low, high)
    return low, high


def with_flipped_data(content: bytes, bits: int = 1) -> bytes:
    """The content of a database's file with some bits changed, evenly spread over its arrays' data.

    The metadata of arrays lies between their data, wherever the writing threads put it.
    """
    texts = [(each.start(), each.end()) for each in re.finditer(rb'{"[ -~]{40,}}', content)]
    starts, stops = [0, *(end for _, end in texts)], [*(start for start, _ in texts), len(content)]
    start, stop = max(zip(starts, stops, strict=True), key=lambda gap: gap[1] - gap[0])
    data = bytearray(content)
    for place in range(1, bits + 1):
        data[start + (stop - start) * place // (bits + 1)] ^= 1
    return bytes(data)


@contextlib.contextmanager
def compiled_programs(*, own: bool = False) -> Iterator[list[str]]:
    """The names of the programs that XLA compiles meanwhile; if ``own``, in the calling thread.

    Others may still compile for an earlier test.
    """
    names, thread = list[str](), threading.get_ident()

    def note(event: str, _: float, **about: Any) -> None:
        is_counted = not own or threading.get_ident() == thread
        if is_counted and event.endswith("backend_compile_duration"):
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.clear_event_listeners()


def write_volume(directory: Any, pieces: Any, file_bytes: int | None = None) -> dict[str, str]:
    """Writes a volume of a base, and gives the names of arrays that equal another one."""
    volume = volumes.Volume(pieces, directory.name, 2)
    volume.write(directory.parent, file_bytes)
    return volume.aliases


def pack_reader(start, kind, size_bytes, zeros=()):
    """Reads an array of one section."""
    _, length_bytes = arrays.laid_out(start, kind, [(size_bytes, zeros)])
    return reader.PackReader(reader.PackArray(start, kind, length_bytes), size_bytes, zeros)


def pack_files(item, process=0):
    """The files of a pack that hold its data."""
    start = folders.pack_in(item, process)
    index = pack_index(item, process)
    return sorted(path for path in start.parent.glob(f"{start.name}.*") if path != index)


def pack_index(item, process=0):
    """The file of a pack that leads to the others."""
    start = folders.pack_in(item, process)
    return start.with_name(f"{start.name}.manifest.ocdbt")


def other_record(known: lineage.Lineage) -> str:
    """Writes the last pack of a lineage again, right checksums and one leaf changed; names it."""
    delta, entry = known.saves[-1]
    reader = delta_reader.readers_of(known)[-1]
    index = max(reader.delta.stored, key=lambda i: known.base.leaves[i].nbytes)
    extents = [e for each in reader.delta.stored for e in reader._extents[each]]
    assert {each.process for each in extents} == {0}
    contents = []
    for kind in (arrays.RAW, arrays.COMPRESSED):
        pack = reader._pack(0, kind)
        is_raw = kind is arrays.RAW
        size = delta.packs[0].raw_bytes if is_raw else delta.packs[0].compressed_bytes
        data = pack.read([(0, size)], what="all")[0].copy()
        extent = next(e for e in extents if e.leaf == index)
        if is_raw is not bool(extent.compressed_bytes):
            spot = data[extent.raw_start :][: extent.raw_bytes]
            if not is_raw:
                spot = data[extent.compressed_start :][: extent.compressed_bytes]
            spot[spot.nonzero()[0][:7]] ^= 3
        contents.append((kind, [data]))
    start = entry.pack(0)
    for path in start.parent.glob(f"{start.name}.*"):
        path.unlink()
    zeros = writer.write_pack(start, contents)
    assert zeros == [[delta.packs[0].raw_zeros], [delta.packs[0].compressed_zeros]]
    return known.base.leaves[index].path


def restored_boxes(item: Any, **options: Any) -> tuple[lineage.Lineage, dict[int, Any]]:
    """The lineage of a step, and its elements on the host, cut as they were saved."""
    options = {"fallback_sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0]), **options}
    restorer = StepRestorer(StockCheckpoints(), {}, None)
    found = restorer.restore(item, adacheck.RestoreArgs(**options))
    assert found.lineage is not None
    blocks = {}
    for index, (leaf, value) in enumerate(
        zip(found.lineage.base.leaves, found.leaves, strict=True)
    ):
        words = np.asarray(_plain(value)).astype(np.dtype(leaf.dtype), copy=False)
        if leaf.nbytes:
            blocks[index] = {box: words[(*box.slices, ...)] for box in leaf.boxes}
    return found.lineage, blocks


def put_base(known: lineage.Lineage, blocks: dict[int, Any]) -> BaseManifest:
    """Puts a base into the place of the delta at the end of a lineage."""
    alone = new_base.Team(0, lambda _topic, own, judge: judge([own]))
    with in_place.prepared(known, blocks, alone, None) as base:
        base.put()
    return base.manifest


def compact(root: Any, step: int, item: str = "default") -> BaseManifest:
    """Compacts a step as a training run does that has its state on the host."""
    return put_base(*restored_boxes(root / str(step) / item))


def finish_in_background(handler):
    """Waits until nothing prepares the save that follows a restored step."""
    for saver in handler.run.lines._savers.values():
        saver.finish()
    for thread in threading.enumerate():
        if thread.name == "adacheck_compile":
            thread.join()


def wait_for_compilers() -> None:
    """Waits until checks need not wait for a compiler: a regular save does not wait for them."""
    for each in threading.enumerate():
        if each.name == "adacheck_compile":
            each.join()


def skip_unpinned(version: int) -> None:
    """Skips a root of version 6, whose updates are not pinned, where XLA compiles fast."""
    if version == 6 and "xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]:
        pytest.skip("its bits are those of programs that are optimized as users' are")
