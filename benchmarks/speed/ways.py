"""The ways of saving that are compared: each saves a state, and tells its bytes once it is durable.

Stock Orbax and others save the state without the record, which they have no use for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import tensorstore as ts

import adacheck_jax as adacheck
from benchmarks.common import new_bytes
from benchmarks.speed.states import without_record


class Way(Protocol):
    """One way of saving."""

    def save(self, step: int, state: Any) -> None:
        """Saves; returns when the state may be donated."""
        ...

    def wait(self) -> None:
        """Returns when the save is durable, as far as this way makes it so."""
        ...

    def new_bytes(self, step: int) -> int:
        """Bytes that the save wrote."""
        ...

    def close(self) -> None:
        """Ends."""
        ...


class _Rooted:
    """Saves a folder a step."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def new_bytes(self, step: int) -> int:
        return new_bytes(self._root / str(step))


class _Managed(_Rooted):
    """An Orbax manager."""

    def __init__(
        self, root: Path, manager: ocp.CheckpointManager, args_of: Callable[[Any], Any]
    ) -> None:
        super().__init__(root)
        self.manager, self._args_of = manager, args_of

    def save(self, step: int, state: Any) -> None:
        self.manager.save(step, args=self._args_of(state))

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()


class Managed(_Managed):
    """A handler in an Orbax manager."""

    def __init__(self, root: Path, handler: Any, args_of: Callable[[Any], Any]) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        manager = ocp.CheckpointManager(root, item_handlers=handler, options=options)
        super().__init__(root, manager, args_of)


class Ours(_Managed):
    """The manager that the library makes."""

    def __init__(self, root: Path, recorder: adacheck.Recorder, **options: Any) -> None:
        manager = adacheck.checkpoint_manager(root, recorder, max_to_keep=2, **options)
        super().__init__(root, manager, adacheck.SaveArgs)


class VersionOne(_Rooted):
    """Orbax's new API."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        keep = ocp_v1.training.preservation_policies.LatestN(2)
        self._checkpointer = ocp_v1.training.Checkpointer(root, preservation_policy=keep)
        self._response: Any = None

    def save(self, step: int, state: Any) -> None:
        self._response = self._checkpointer.save_pytree_async(step, without_record(state))

    def wait(self) -> None:
        self._response.result()

    def close(self) -> None:
        self._checkpointer.close()


class _Files(_Rooted):
    """Files that are written by hand; the step before the last is deleted, if they are not kept."""

    keeps = False

    def _directory(self, step: int) -> Path:
        if not self.keeps:
            shutil.rmtree(self._root / str(step - 2), ignore_errors=True)
        directory = self._root / str(step)
        directory.mkdir(parents=True)
        return directory

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class OneFile(_Files):
    """The bytes one after the other into one file, and fsync: what the storage can do.

    Args:
        root: where the steps go.
        part_of: what of a state is written.
        keeps: all files, as a lineage keeps its deltas: the memory of files that were deleted is
            written to faster than memory that the page cache has to find.
    """

    def __init__(self, root: Path, part_of: Callable[[Any], Any], *, keeps: bool = False) -> None:
        super().__init__(root)
        self._part_of = part_of
        self.keeps = keeps

    def save(self, step: int, state: Any) -> None:
        with open(self._directory(step) / "bytes", "wb") as file:
            for leaf in jax.tree.leaves(self._part_of(state)):
                file.write(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
            file.flush()
            os.fsync(file.fileno())


class RawTensorStore(_Files):
    """One uncompressed zarr3 array a leaf, with tensorstore alone; durable when it returns."""

    def save(self, step: int, state: Any) -> None:
        directory, writes = self._directory(step), []
        for number, leaf in enumerate(jax.tree.leaves(without_record(state))):
            array = np.asarray(leaf)
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{directory}/{number}/"},
                "metadata": {"shape": array.shape, "data_type": array.dtype.name},
            }
            writes.append(ts.open(spec, create=True).result().write(array))
        for write in writes:
            write.result()


class TorchDCP(_Files):
    """PyTorch's ``async_save`` of the same tensors."""

    def __init__(self, root: Path) -> None:
        import torch.distributed as dist

        super().__init__(root)
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo", init_method=f"file://{root}.rendezvous", rank=0, world_size=1
            )
        self._future: Any = None

    def save(self, step: int, state: Any) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        leaves = jax.tree.leaves(without_record(state))
        tensors = {str(i): torch.utils.dlpack.from_dlpack(leaf) for i, leaf in enumerate(leaves)}
        directory = self._directory(step)
        self._future = dcp.async_save(tensors, checkpoint_id=directory)

    def wait(self) -> None:
        self._future.result()


DELTA, BASE, STOCK, FLOOR = "delta", "base", "stock Orbax", "manager's floor (JSON)"
STATE_FILE, DELTA_FILE = "write + fsync of the state", "write + fsync of a delta's bytes"
PAIRED = {DELTA_FILE: DELTA, STATE_FILE: BASE}
"""What is written by hand, to what it is compared with."""


def all_ways(root: Path, recorder: adacheck.Recorder, saves: int) -> dict[str, Callable[[], Way]]:
    """Each way by its name, to be begun in a folder of its own.

    Args:
        root: where they save.
        recorder: of the run.
        saves: longest lineage that is needed.
    """

    def ours(name: str, **options: Any) -> Callable[[], Way]:
        return lambda: Ours(root / name, recorder, **options)

    def handled(name: str, **options: Any) -> Callable[[], Way]:
        return lambda: Managed(
            root / name, adacheck.AdaCheckHandler(recorder, **options), adacheck.SaveArgs
        )

    def stock(name: str, handler: Callable[[], Any], args: Any) -> Callable[[], Way]:
        return lambda: Managed(root / name, handler(), lambda s: args(without_record(s)))

    def record_of(state: Any) -> Any:
        return state["opt_state"].adacheck_record

    ways: dict[str, Callable[[], Way]] = {
        DELTA: ours(DELTA, max_deltas=saves),
        "delta, Orbax's own manager": handled("delta_handled", max_deltas=saves),
        "delta, compression small": ours("delta_small", max_deltas=saves, compression="small"),
        BASE: ours(BASE, max_deltas=0),
        "base, compression fast": ours("base_fast", max_deltas=0, compression="fast"),
        STOCK: stock("stock", ocp.StandardCheckpointHandler, ocp.args.StandardSave),
        "stock Orbax, uncompressed": stock(
            "plain", lambda: ocp.PyTreeCheckpointHandler(use_compression=False), ocp.args.PyTreeSave
        ),
        "stock Orbax v1": lambda: VersionOne(root / "v1"),
        "raw tensorstore": lambda: RawTensorStore(root / "tensorstore"),
        STATE_FILE: lambda: OneFile(root / "state_file", without_record),
        DELTA_FILE: lambda: OneFile(root / "delta_file", record_of, keeps=True),
        FLOOR: lambda: Managed(
            root / "floor", ocp.JsonCheckpointHandler(), lambda _: ocp.args.JsonSave({})
        ),
    }
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

        ways["PyTorch DCP"] = lambda: TorchDCP(root / "dcp")
    return ways
