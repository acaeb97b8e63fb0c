"""One row of the matrix: trains a few steps, and keeps what each update took and gave."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import adacheck_jax as adacheck
from adacheck_jax.state.exported_update import ExportedUpdates
from tests.campaigns import optimizers
from tests.campaigns.flax_models import ALL
from tests.campaigns.layouts import mesh_of, shardings_of
from tests.campaigns.replays import Case, Update

STEPS = 4
EXAMPLES = 16
_LAYOUTS = ("one", "data", "sharded", "sharded_42", "data_42", "explicit_42")
_LOSS_SCALE = 1024.0


class LeftOut(Exception):
    """Why a row has no replays."""


@dataclass(frozen=True)
class Row:
    """What is trained.

    Attributes:
        seed: what it was drawn from.
        optimizer, model, layout, param_dtype, record_dtype: by name.
        mapped: whether the step is a ``shard_map`` with ``pmean``, where the layout has replicas.
        l2: whether the loss has a term of all params.
        scaled: whether the loss is scaled up, and the gradients down.
        alone: whether batches have one example.
        clips: whether gradients are clipped before the recorder.
        integers: whether the params have a leaf of integers.
        lookahead: whether the recorder is inside optax.lookahead.
    """

    seed: int
    optimizer: str
    model: str
    layout: str
    param_dtype: str
    record_dtype: str | None
    mapped: bool
    l2: bool
    scaled: bool
    alone: bool
    clips: bool
    integers: bool
    lookahead: bool

    @property
    def text(self) -> str:
        """The row in one line."""
        flags = [name for name, value in asdict(self).items() if value is True]
        names = ("optimizer", "model", "layout", "param_dtype", "record_dtype")
        return ", ".join([str(getattr(self, name)) for name in names] + flags)


def draw(seed: int, *, summing: bool = False) -> Row:
    """Draws a row, among all optimizers or among those that add up elements."""
    rng = random.Random(f"row {seed}")
    names = [list(optimizers.found()), list(optimizers.COMPOSED)]
    if summing:
        names = [list(optimizers.SUMMING)]
    param_dtype = rng.choice(("float32",) * 4 + ("bfloat16", "float16"))
    layout = rng.choice(_LAYOUTS)
    records = (None, None, None, "bfloat16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
    return Row(
        seed=seed,
        optimizer=rng.choice(rng.choice(names)),
        model=rng.choice(list(ALL)),
        layout=layout,
        param_dtype=param_dtype,
        record_dtype=rng.choice(records),
        mapped=layout.startswith("data") and rng.random() < 0.4,
        l2=rng.random() < 0.3,
        scaled=rng.random() < 0.2,
        alone=rng.random() < 0.2,
        clips=rng.random() < 0.3 and not layout.startswith("explicit"),  # a dot product
        integers=rng.random() < 0.08,
        lookahead=rng.random() < 0.04,
    )


def other_layouts(row: Row) -> list[str]:
    """The meshes that a row is replayed on: its own, one device, and another."""
    rng = random.Random(f"others {row.seed}")
    others = ("data", "sharded", "sharded_42", "sharded_24", "sharded_22")
    other = rng.choice([each for each in others if each != row.layout])
    return list(dict.fromkeys((row.layout, "one", other)))


class Trained:
    """The training of one row.

    Args:
        row: what is trained.
        options: for the Recorder.
    """

    def __init__(self, row: Row, options: dict[str, Any]) -> None:
        self.row = row
        model = ALL[row.model]
        rng = np.random.default_rng(row.seed)
        params, carried = model.initial(rng, jnp.dtype(row.param_dtype))
        if row.integers:
            params = {"model": params, "ids": jnp.arange(48, dtype=jnp.int32)}
        dtype = None if row.record_dtype is None else jnp.dtype(row.record_dtype)
        tx = optimizers.all_of()[row.optimizer]()
        extra = {}
        if row.optimizer in optimizers.TAKE_VALUE:
            extra = {"extra_args": {"value": jnp.zeros(())}}
        self.recorder = adacheck.Recorder(tx, dtype=dtype, **extra, **options)
        parts: list[Any] = [optax.clip_by_global_norm(1.0)] if row.clips else []
        self.tx: Any = optax.chain(*parts, self.recorder)
        self.takes_value = bool(extra)
        if row.lookahead:
            self.tx = optax.lookahead(self.tx, sync_period=2, slow_step_size=0.5)
            params = optax.LookaheadParams.init_synced(params)
        state = {"params": params, "opt": self.tx.init(params), "carried": carried}
        state = jax.tree.map(jnp.array, state)  # no buffer twice: they are donated
        self.shardings = shardings_of(state, row.layout)
        self.state = jax.device_put(state, self.shardings)
        self.step = jax.jit(
            self._mapped if row.mapped else self._advance,
            donate_argnums=0,
            out_shardings=self.shardings,
        )

    def _loss(self, params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
        row = self.row
        used = params["model"] if row.integers else params
        if row.layout.startswith("explicit"):
            whole = NamedSharding(mesh_of(row.layout), PartitionSpec())
            used = jax.tree.map(lambda p: jax.sharding.reshard(p, whole), used)
        value, rest = ALL[row.model].loss(used, carried, batch)
        if row.l2:
            value = value + 1e-3 * sum(
                jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(used)
            )
        return value * (_LOSS_SCALE if row.scaled else 1.0), rest

    def _advance(self, state: Any, batch: Any) -> Any:
        row = self.row
        params = state["params"].fast if row.lookahead else state["params"]
        graded = jax.value_and_grad(self._loss, has_aux=True, allow_int=row.integers)
        (value, carried), grads = graded(params, state["carried"], batch)
        if row.integers:
            grads = {**grads, "ids": jnp.ones((48,), jnp.int32)}
        if row.mapped:
            value, grads = jax.lax.pmean((value, grads), mesh_of(row.layout).axis_names)
            carried = jax.tree.map(self._mean, carried)
        if row.scaled:
            floats = lambda g: g / _LOSS_SCALE if g.dtype != jnp.int32 else g  # noqa: E731
            grads = jax.tree.map(lambda g: floats(g).astype(g.dtype), grads)
        given = {"value": value.astype(jnp.float32)} if self.takes_value else {}
        updates, opt = self.tx.update(grads, state["opt"], state["params"], **given)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "carried": carried}

    def _mean(self, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.lax.pmean(leaf, mesh_of(self.row.layout).axis_names)

    def _mapped(self, state: Any, batch: Any) -> Any:
        mesh, out = mesh_of(self.row.layout), PartitionSpec()
        cut = out if len(batch[0]) % mesh.size else PartitionSpec(mesh.axis_names)
        specs = (out, cut)
        return jax.shard_map(
            self._advance, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
        )(state, batch)

    def batch(self, step: int) -> Any:
        row = self.row
        rng = np.random.default_rng([row.seed, step])
        arrays = ALL[row.model].batch(rng, 1 if row.alone else EXAMPLES)
        mesh = mesh_of(row.layout)
        sharding: Any = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            whole = row.layout.startswith("explicit") or len(arrays[0]) % mesh.size
            spec = PartitionSpec() if whole else PartitionSpec(mesh.axis_names)
            sharding = NamedSharding(mesh, spec)
        return jax.device_put(arrays, sharding)

    def case(self, root: Path) -> tuple[Case, dict[str, Any]]:
        """Trains; the update program and its leaves are those that a base on disk tells.

        Args:
            root: an empty directory.

        Returns:
            The updates, and the manifest's entry of the update.

        Raises:
            LeftOut: the library does not replay this update.
        """
        program, update = self._saved(root)
        before = self._leaves()
        updates = []
        for step in range(STEPS):
            self.state = self.step(self.state, self.batch(step))
            after = self._leaves()
            changed = [
                n for n, a, b in zip(self.names, before, after, strict=True) if a.dtype != b.dtype
            ]
            if changed:
                raise LeftOut(f"training changes the data types of the state: {changed[0]}")
            taken = [[before[i] for i in update[role]] for role in ("params", "inner")]
            given = [[after[i] for i in update[role]] for role in ("record", "extra")]
            new = [[after[i] for i in update[role]] for role in ("params", "inner")]
            updates.append(Update(*taken, *given, *new))
            before = after
        computed = [i for role in ("params", "inner") for i in update[role]]
        names = ["" if i in self.stored else self.names[i] for i in computed]
        if self.row.lookahead:  # which changes the params behind the update
            names = ["" if name.startswith("params/") else name for name in names]
        return Case(program, names, updates), update

    def _saved(self, root: Path) -> tuple[bytes, dict[str, Any]]:
        path = "params/fast" if self.row.lookahead else "params"
        handler = adacheck.AdaCheckHandler(self.recorder, params_path=path)
        classified = []
        of = ExportedUpdates.of

        def noted(programs: Any, structure: Any) -> Any:
            classified.append(of(programs, structure))
            return classified[-1]

        with (
            mock.patch.object(ExportedUpdates, "of", noted),
            ocp.CheckpointManager(root, item_handlers=handler) as manager,
        ):
            manager.save(0, args=adacheck.SaveArgs(self.state))
        self.stored = classified[-1].unreplayed  # by their classes, whatever a check would find
        item = root / "0" / "default" / "adacheck"
        manifest = json.loads((item / "manifest.json").read_text())
        found = manifest.get("update") or (manifest.get("updates") or [None])[0]
        if not found:
            raise LeftOut("the base holds no update")
        if found.get("problem") or not found.get("programs"):
            raise LeftOut(found.get("problem") or "no program")
        self.names = [leaf["path"] for leaf in manifest["leaves"]]
        return (item / "update.cpu.stablehlo").read_bytes(), found

    def _leaves(self) -> list[np.ndarray]:
        def plain(leaf: Any) -> Any:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            return jax.random.key_data(leaf) if is_key else leaf

        return [np.array(plain(leaf)) for leaf in jax.tree.leaves(self.state)]
