"""What is left to write of a step once everything that can be had elsewhere is left out.

    python -m benchmarks.redundancy

Small language models learn the text of Python's standard library on 128 virtual CPU devices, in
mixed precision: bfloat16 params, float32 master weights and two float32 Adam moments, 14 bytes a
trained param; the record is the bfloat16 gradient. Each case lays the state out in another way.
Every step is saved, without compression and with it, and the last one of each lineage is restored
and compared with the trained state, bit by bit and shard by shard.

Bytes are held against what 128 ranks would write if each wrote all that it holds, and against a
stock Orbax save of the same state.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.update.recorder_state import RECORD_FIELD
from benchmarks import xla_flags
from benchmarks.common import (
    CONTEXT,
    Block,
    LanguageModel,
    environment,
    new_bytes,
    solved_width,
    tokens_of,
)
from examples.train_lm import corpus

DEVICE_COUNT = 128
MAX_DELTAS = 5
STEPS = MAX_DELTAS + 3
"""A base, ``MAX_DELTAS`` deltas, a second base, and a delta after it."""
STOCK_REPEATS = 3
LINEAGE_ENDS = (1 + MAX_DELTAS, STEPS)
"""The last step of each lineage: these are restored."""
LINEAGE_DELTAS = 20
"""Deltas a base in the mean that is reported: the handler's default."""
RATE = 1e-3
LAYERS, LANES = 2, 128
VOCABULARY, EXPERTS, EXPERT_FACTOR = 4096, 16, 2
MODEL_AXIS, EXPERT_BATCH = 8, 8
RANK = 8
LEAN = 1.5
"""What the router adds to the score of the last expert, and takes from that of the first."""
TEXT_BYTES = 2_000_000
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
# One core may have to run many devices before the last one comes to a collective.
_PATIENCE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)

Compression = Literal["none", "small"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "small")
TARGETS: dict[Compression, float] = {"none": 890.0, "small": 1150.0}


class MasterState(NamedTuple):
    """State of :func:`with_master_weights`: float32 params, and what is kept for them."""

    master: Any
    inner: Any


def with_master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets ``tx`` update float32 copies of bfloat16 params, which follow by rounding."""

    def as_float32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> MasterState:
        master = as_float32(params)
        return MasterState(master, tx.init(master))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MasterState]:
        steps, inner = tx.update(as_float32(updates), state.inner, state.master)
        master = optax.apply_updates(state.master, steps)
        return jax.tree.map(jnp.subtract, master, as_float32(params)), MasterState(master, inner)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        initial: makes float32 params: those that are trained, and those that stay as they are.
        loss: of the trained params, the frozen params and tokens.
        tokens: a batch, from the step's number.
    """

    initial: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any, jax.Array], jax.Array]
    tokens: Callable[[int], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A task and how its state lies on the devices.

    Attributes:
        task: from about how many params it is to have, and the number of devices.
        mesh: names and sizes of the mesh's axes, from the number of devices. Batches are cut along
            ``data``.
        cut: how a leaf is cut, from its path, its shape and the mesh. Optimizer state is cut like
            the param whose path its own path ends with.
    """

    task: Callable[[int, int], Task]
    mesh: Callable[[int], dict[str, int]]
    cut: Callable[[str, tuple[int, ...], Mesh], PartitionSpec]


def language_task(params_count: int, devices: int) -> Task:
    """A dense transformer over bytes."""
    model = language_model(params_count)
    return Task(
        lambda: (model.initial(), {}),
        lambda params, _, tokens: model.loss(params, tokens),
        lambda step: tokens_of(step, devices),
    )


def language_model(params_count: int) -> LanguageModel:
    width = solved_width(params_count, 12 * LAYERS, 256 + CONTEXT, LANES)
    return LanguageModel(width, jnp.bfloat16, LAYERS)


def adapter_task(params_count: int, devices: int) -> Task:
    """Low-rank adapters of every kernel of a dense transformer that itself is frozen."""
    model = language_model(params_count)

    def initial() -> tuple[Any, Any]:
        frozen = model.initial()
        kernels = {p: k for p, k in trees.flatten(frozen)[0].items() if p.endswith("kernel")}
        keys = jax.random.split(jax.random.key(1), len(kernels))
        adapters = {
            path: {
                "a": jax.random.normal(key, (kernel.shape[0], RANK)) / np.sqrt(kernel.shape[0]),
                "b": jnp.zeros((RANK, kernel.shape[1])),
            }
            for key, (path, kernel) in zip(keys, kernels.items(), strict=True)
        }
        return adapters, frozen

    def loss(adapters: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        leaves, treedef = trees.flatten(frozen)
        for path, adapter in adapters.items():
            leaves[path] = leaves[path] + adapter["a"] @ adapter["b"]
        return model.loss(trees.unflatten(treedef, list(leaves.values())), tokens)

    return Task(initial, loss, lambda step: tokens_of(step, devices))


class Experts(nn.Module):
    """Each token goes through the one expert that a router chooses for it; nothing balances them.

    The router leans towards some of them, so that others get no token of a small batch.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        width = x.shape[-1]
        scores = nn.Dense(EXPERTS, use_bias=False, dtype=jnp.float32, name="router")(x)
        scores = scores + jnp.linspace(-LEAN, LEAN, EXPERTS)
        chosen = jax.nn.one_hot(scores.argmax(-1), EXPERTS, dtype=x.dtype)
        gates = chosen * jax.nn.softmax(scores).astype(x.dtype)
        draw = nn.initializers.lecun_normal(batch_axis=0)
        hidden_width = EXPERT_FACTOR * width
        up = self.param("experts_up", draw, (EXPERTS, width, hidden_width)).astype(x.dtype)
        down = self.param("experts_down", draw, (EXPERTS, hidden_width, width)).astype(x.dtype)
        taken = jnp.einsum("btw,bte->btew", x, chosen)
        hidden = nn.gelu(jnp.einsum("btew,ewh->bteh", taken, up))
        return jnp.einsum("bteh,ehw,bte->btw", hidden, down, gates)


class ExpertModel(nn.Module):
    """A block and a layer of experts over words; embedding and output layer are two tables."""

    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps word ids (batch, time) to float32 logits (batch, time, vocabulary)."""
        dtype = jnp.bfloat16
        x = nn.Embed(VOCABULARY, self.width, dtype=dtype)(tokens)
        x = x + nn.Embed(CONTEXT, self.width, dtype=dtype)(jnp.arange(CONTEXT))
        x = Block(dtype)(x)
        x = x + Experts()(nn.RMSNorm(dtype=dtype)(x))
        head = nn.Dense(VOCABULARY, use_bias=False, dtype=dtype, name="head")
        return head(nn.RMSNorm(dtype=dtype)(x)).astype(jnp.float32)


@functools.cache
def word_ids() -> np.ndarray:
    """The text as word ids: hashes of its words and signs."""
    found = re.findall(rb"\w+|[^\w\s]", corpus()[:TEXT_BYTES].tobytes())
    return np.array([zlib.crc32(word) % VOCABULARY for word in found], np.int32)


def expert_task(params_count: int, devices: int) -> Task:
    """A mixture of experts; a step touches few rows of its embedding."""
    quadratic = 12 + 2 * EXPERTS * EXPERT_FACTOR
    model = ExpertModel(solved_width(params_count, quadratic, 2 * VOCABULARY + CONTEXT, 32))

    def initial() -> tuple[Any, Any]:
        tokens = jnp.zeros((1, CONTEXT), jnp.int32)
        return model.init(jax.random.key(0), tokens)["params"], {}

    def loss(params: Any, _: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    batch = max(EXPERT_BATCH, devices // EXPERTS)
    return Task(initial, loss, lambda step: tokens_of(step, batch, word_ids()))


def whole(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    return PartitionSpec()


def fully_cut(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Along the first axis that the devices divide."""
    for axis, length in enumerate(shape):
        if length % mesh.size == 0:
            return PartitionSpec(*[None] * axis, "data")
    return PartitionSpec()


def tensor_cut(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """What widens is cut by columns, what narrows by rows, and the vocabulary by rows."""
    if path.endswith(("qkv/kernel", "up/kernel")):
        return PartitionSpec(None, "model")
    if path.endswith(("attention_out/kernel", "down/kernel", "Embed_0/embedding")):
        return PartitionSpec("model")
    return PartitionSpec()


def expert_cut(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Each device has some of the experts; the rest is replicated."""
    is_expert = path.endswith(("experts_up", "experts_down"))
    return PartitionSpec("expert") if is_expert else PartitionSpec()


def data_mesh(devices: int) -> dict[str, int]:
    return {"data": devices}


CASES = {
    "data": Case(language_task, data_mesh, whole),
    "fsdp": Case(language_task, data_mesh, fully_cut),
    "tensor": Case(
        language_task, lambda n: {"data": n // MODEL_AXIS, "model": MODEL_AXIS}, tensor_cut
    ),
    "expert": Case(expert_task, lambda n: {"data": n // EXPERTS, "expert": EXPERTS}, expert_cut),
    "lora": Case(adapter_task, data_mesh, whole),
}


def handler_of(recorder: adacheck.Recorder, compression: Compression) -> adacheck.AdaCheckHandler:
    return adacheck.AdaCheckHandler(recorder, max_deltas=MAX_DELTAS, compression=compression)


def without_record(state: Any) -> Any:
    """The state as it would be without us."""
    return {**state, "opt_state": state["opt_state"][-1].adacheck_inner}


class Training:
    """One case: its state, step by step.

    Args:
        case: what is trained.
        params_count: about how many params it is to have.
        devices: number of devices.
    """

    def __init__(self, case: Case, params_count: int, devices: int) -> None:
        sizes = case.mesh(devices)
        axes = (AxisType.Auto,) * len(sizes)
        self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axes)
        self.recorder = adacheck.Recorder(with_master_weights(optax.adamw(RATE)))
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), self.recorder)
        self._task = case.task(params_count, devices)
        shapes = jax.eval_shape(self._initial)
        shardings = jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(
                self.mesh, case.cut(trees.leaf_path(path), leaf.shape, self.mesh)
            ),
            shapes,
        )
        self.abstract = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            shapes,
            shardings,
        )
        self.state: Any = jax.jit(self._initial, out_shardings=shardings)()
        self.losses: list[float] = []
        self._step: Any = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(shardings, None)
        )

    def _initial(self) -> Any:
        halved = jax.tree.map(lambda p: p.astype(jnp.bfloat16), self._task.initial())
        params, frozen = halved
        opt_state = self._optimizer.init(params)
        return {"params": params, "frozen": frozen, "opt_state": opt_state, "step": jnp.int32(0)}

    def _train_step(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params = state["params"]
        loss, grads = jax.value_and_grad(self._task.loss)(params, state["frozen"], tokens)
        updates, opt_state = self._optimizer.update(grads, state["opt_state"], params)
        params = optax.apply_updates(params, updates)
        after = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return {**state, **after}, loss

    def advance(self, step: int) -> None:
        """Trains one step."""
        tokens = jax.device_put(
            self._task.tokens(step), NamedSharding(self.mesh, PartitionSpec("data"))
        )
        self.state, loss = jax.block_until_ready(self._step(self.state, tokens))
        self.losses.append(float(loss))

    def zero_share(self) -> float:
        """How much of the last gradient is exactly zero."""
        record = jax.tree.leaves(self.state["opt_state"][-1].adacheck_record)
        zeros = sum(int((np.asarray(leaf) == 0).sum()) for leaf in record)
        return zeros / sum(leaf.size for leaf in record)

    def idle_experts(self) -> int:
        """How many experts got no gradient at all."""
        record, _ = trees.flatten(self.state["opt_state"][-1].adacheck_record)
        stacks = [np.asarray(leaf) for path, leaf in record.items() if "experts_" in path]
        idle = [~stack.any(axis=(1, 2)) for stack in stacks]
        return int(np.logical_and.reduce(idle).sum()) if idle else 0


class Files:
    """Counts what is new in each step's directory, in two ways that have to agree."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def new_bytes(self, step_directory: Path) -> int:
        """Bytes of the files that no earlier step has; call it once for each step, in order."""
        stats = [path.stat() for path in step_directory.rglob("*") if path.is_file()]
        new = {stat.st_ino: stat.st_size for stat in stats if stat.st_ino not in self._known}
        self._known |= new.keys()
        counted = new_bytes(step_directory)
        if counted != sum(new.values()):
            raise SystemExit(
                f"{step_directory}: {counted} bytes lie outside the folders of links, but "
                f"{sum(new.values())} bytes are in files that no earlier step has"
            )
        return counted


@dataclass(frozen=True)
class Saved:
    """What the steps of one manager took.

    Attributes:
        bases: bytes of the first and second base.
        deltas: bytes of each delta.
        stored: leaves of the deltas that are no gradients.
    """

    bases: tuple[int, int]
    deltas: tuple[int, ...]
    stored: tuple[str, ...]

    @property
    def delta(self) -> int:
        """Median bytes of a delta."""
        return int(statistics.median(self.deltas))

    @property
    def mean(self) -> float:
        """Bytes a step over a base, as every one but the first is, and the deltas after it."""
        return (self.bases[1] + LINEAGE_DELTAS * self.delta) / (1 + LINEAGE_DELTAS)


def saved(root: Path, sizes: Mapping[int, int]) -> Saved:
    """Reads back what each step is; fails where a delta is not one update, replayed and checked."""
    bases, deltas = [], []
    stored: set[str] = set()
    base = None
    for step, size in sizes.items():
        manifest = manifest_file.read(root / str(step) / "default")
        if isinstance(manifest, BaseManifest):
            base, update = manifest, manifest.update
            bases.append(size)
            if update is None or update.problem or update.reducing:
                raise SystemExit(f"{root}, step {step}: the update is not element-wise: {update}")
            continue
        assert isinstance(manifest, DeltaManifest)
        assert base is not None
        deltas.append(size)
        if manifest.unreplayed or not manifest.has_update or not manifest.checked:
            raise SystemExit(f"{root}, step {step}: not replayed: {manifest.caution.reason}")
        stored |= {base.leaves[index].path for index in manifest.stored}
    if len(bases) != 2:
        reason = base.reason if base else ""
        raise SystemExit(f"{root}: expected 2 bases, found {len(bases)}; the last one: {reason}")
    others = sorted(path for path in stored if RECORD_FIELD not in path.split("/"))
    return Saved((bases[0], bases[1]), tuple(deltas), tuple(others))


def check_restored(
    training: Training, root: Path, step: int, live: Mapping[str, np.ndarray]
) -> None:
    """Restores a step without the recorder and compares every shard with what was trained.

    Raises:
        SystemExit: a bit differs.
    """
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler()) as manager:
        state = manager.restore(step, args=adacheck.RestoreArgs(training.abstract))
    leaves, _ = trees.flatten(state)
    if leaves.keys() != live.keys():
        raise SystemExit(f"{root}: step {step} was restored with other leaves than were trained")
    for path, leaf in leaves.items():
        for shard in leaf.addressable_shards:
            if np.asarray(shard.data).tobytes() != live[path][shard.index].tobytes():
                raise SystemExit(f"{root}: step {step} was restored with other bits in {path}")


def stock_bytes(root: Path, state: Any) -> list[int]:
    """What stock Orbax writes of a state, several times: its database keeps what it superseded."""
    with ocp.CheckpointManager(root) as manager:
        for number in range(STOCK_REPEATS):
            manager.save(number, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return [new_bytes(root / str(number)) for number in range(STOCK_REPEATS)]


def undivided_replicas() -> None:
    """Has Orbax write a replicated array from one device, in our bases and in stock saves alike.

    It would else cut each such array into a slice for each replica: on many devices of one process
    that compiles a program for every slice, and takes more bytes.
    """
    whole_arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    ocp.type_handlers.register_type_handler(jax.Array, whole_arrays, override=True)


def measure(name: str, params_count: int, devices: int, root: Path) -> dict[str, Any]:
    """Trains one case, saves every step, restores the last of each lineage, and tells the bytes."""
    start = time.perf_counter()
    training = Training(CASES[name], params_count, devices)
    sizes: dict[Compression, dict[int, int]] = {each: {} for each in COMPRESSIONS}
    counters = {each: Files() for each in COMPRESSIONS}
    managers: dict[Compression, ocp.CheckpointManager] = {
        each: ocp.CheckpointManager(root / each, item_handlers=handler_of(training.recorder, each))
        for each in COMPRESSIONS
    }
    zeros, idle, live = [], [], {}
    for step in range(1, STEPS + 1):
        training.advance(step)
        for each, manager in managers.items():
            manager.save(step, args=adacheck.SaveArgs(training.state))
            manager.wait_until_finished()
            sizes[each][step] = counters[each].new_bytes(root / each / str(step))
        zeros.append(training.zero_share())
        idle.append(training.idle_experts())
        if step in LINEAGE_ENDS:
            leaves, _ = trees.flatten(training.state)
            live[step] = {path: np.array(leaf) for path, leaf in leaves.items()}
    for manager in managers.values():
        manager.close()
    plain = without_record(training.state)
    stock = stock_bytes(root / "stock", plain)
    leaves = jax.tree.leaves(plain)
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    result: dict[str, Any] = {
        "case": name,
        "mesh": dict(training.mesh.shape),
        "params": count(plain["params"]) + count(plain["frozen"]),
        "trained_params": count(plain["params"]),
        "losses": [round(loss, 4) for loss in training.losses],
        "zero_gradient_share": statistics.median(zeros),
        "idle_experts": idle,
        "state_bytes": sum(leaf.nbytes for leaf in leaves),
        "every_rank_bytes": sum(shard.data.nbytes for shard in shards),
        "stock_bytes": int(statistics.median(stock)),
        "stock_bytes_range": (min(stock), max(stock)),
    }
    del plain, leaves, shards
    training.state = None  # makes room for what is restored
    for each in COMPRESSIONS:
        for step, expected in live.items():
            check_restored(training, root / each, step, expected)
        found = saved(root / each, sizes[each])
        result[each] = {
            "base_bytes": found.bases,
            "delta_bytes": found.deltas,
            "median_delta_bytes": found.delta,
            "stored_beside_gradients": found.stored,
            "every_rank_to_delta": result["every_rank_bytes"] / found.delta,
            "stock_to_delta": result["stock_bytes"] / found.delta,
            "every_rank_to_mean": result["every_rank_bytes"] / found.mean,
        }
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def run(names: Sequence[str], params_count: int, devices: int) -> dict[str, Any]:
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            rows.append(measure(name, params_count, devices, Path(root)))
    return {
        "devices": devices,
        "steps": STEPS,
        "max_deltas": MAX_DELTAS,
        "learning_rate": RATE,
        "seed": 0,
        **environment(),
        "cases": rows,
    }


def tables(result: dict[str, Any]) -> str:
    """Markdown: what is written, then how it compares."""
    sizes = [
        "| case | mesh | params | state | every rank | stock Orbax | first base | second base "
        "| delta, uncompressed | delta | zeros in the gradient |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios = [
        "| case | every rank ÷ delta, uncompressed | every rank ÷ delta | stock ÷ delta, "
        "uncompressed | stock ÷ delta "
        f"| every rank ÷ mean of a base and {LINEAGE_DELTAS} deltas |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        plain, packed = row["none"], row["small"]
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
        written = [
            *(row[key] for key in ("params", "state_bytes", "every_rank_bytes", "stock_bytes")),
            *packed["base_bytes"],
            plain["median_delta_bytes"],
            packed["median_delta_bytes"],
        ]
        cells = [row["case"], mesh, *(f"{each:,}" for each in written)]
        sizes.append(f"| {' | '.join(cells)} | {row['zero_gradient_share']:.1%} |")
        compared = [
            *(each["every_rank_to_delta"] for each in (plain, packed)),
            *(each["stock_to_delta"] for each in (plain, packed)),
            packed["every_rank_to_mean"],
        ]
        ratios.append(f"| {row['case']} | {' | '.join(f'{each:,.1f}x' for each in compared)} |")
    idle = [
        f"Experts of {EXPERTS} that got no token, step by step: {row['idle_experts']}."
        for row in result["cases"]
        if any(row["idle_experts"])
    ]
    return "\n\n".join(["\n".join(sizes), "\n".join(ratios), *idle, *target_lines(result)])


def target_lines(result: dict[str, Any]) -> list[str]:
    """What was reached of what the project set itself."""
    lines = []
    for row in result["cases"]:
        if row["case"] != "data" or result["devices"] != DEVICE_COUNT:
            continue
        for key, target in TARGETS.items():
            ratio = row[key]["every_rank_to_delta"]
            reached = "reached" if ratio >= target else "not reached"
            lines.append(
                f"Target, data, compression={key!r}: every rank ÷ delta at least {target:,.0f}x: "
                f"{ratio:,.1f}x, {reached}."
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", type=int, default=DEVICE_COUNT, help="virtual CPU devices")
    parser.add_argument("--params", type=int, default=1_600_000, help="about how many each")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    if arguments.devices % EXPERTS:
        parser.error(f"--devices: expected a multiple of {EXPERTS}, found {arguments.devices}")
    # JAX reads this when it is first asked for devices.
    flags = re.sub(rf"{_DEVICES_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags = [flags, f"{_DEVICES_FLAG}={arguments.devices}", *xla_flags.known(_PATIENCE_FLAGS)]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    undivided_replicas()
    result = run(arguments.cases, arguments.params, arguments.devices)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        head = {key: value for key, value in result.items() if key != "cases"}
        print(json.dumps(head), tables(result), sep="\n\n")


if __name__ == "__main__":
    main()
