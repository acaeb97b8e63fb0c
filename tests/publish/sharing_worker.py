"""Publishes sharded params together with other processes, and says what was published.

Modes: ``publish`` versions, of which each process writes its share; ``refused``, where one process
cannot write; ``differing``, where one publishes another version; ``taken_over`` by a later one;
``follow`` what is published; ``drifted`` replicas; ``endless`` versions.
"""

from __future__ import annotations

from tests.one_process import own  # isort: skip

import itertools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.device import fingerprint
from adacheck_jax.errors import (
    DifferingCallsError,
    IntegrityError,
    LineageError,
    MismatchError,
    ReplicaError,
    StorageError,
)
from adacheck_jax.publish import Follower, Publisher
from adacheck_jax.publish.reading import VersionReader
from adacheck_jax.publish.root import GoneError, Root
from adacheck_jax.publish.weights import Weights
from tests.publish.states import moving


def params(version: int) -> dict[str, Any]:
    """The weights of a version on all devices; of ``one`` each process has its own."""
    mesh = jax.make_mesh((own.processes, own.devices), ("x", "y"))
    specs = {"cut": PartitionSpec("x", "y"), "small": PartitionSpec("y"), "one": None}
    found = {}
    for name, array in moving(version).items():
        if (spec := specs.get(name, PartitionSpec())) is None:
            found[name] = jnp.asarray(array)
            continue
        placed = NamedSharding(mesh, spec)
        found[name] = jax.make_array_from_callback(array.shape, placed, lambda i, x=array: x[i])
    return found


def publish() -> None:
    """Publishes versions, takes the root over from itself, and goes on.

    Of several devices each fingerprints what it has, as accelerators do.
    """
    if own.devices > 1:
        fingerprint.hashes_on_device = lambda array: isinstance(array, jax.Array)
    for first in (0, 5):
        with Publisher(own.root, base_every=3, keep_versions=4) as publisher:
            assert publisher.version == (first - 1 if first else None)
            for version in range(first, first + 5):
                given = params(version)
                publisher.publish(given, version=version)
                for array in given.values():
                    array.delete()  # as a train step that is given them does
            report = publisher.wait()
            assert report is not None
            assert report.version == first + 4
            assert report.sequence == first + 4


def refused() -> None:
    """One process cannot write a version: all are told, and the next one is published."""
    store = Root.store

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with Publisher(own.root) as publisher:
        publisher.publish(params(0), version=0, wait=True)
        if own.process == 1:
            Root.store = full  # type: ignore[method-assign]
        publisher.publish(params(1), version=1)
        publisher.publish(params(2), version=2)
        with pytest.raises(StorageError, match="No space"):
            publisher.wait()
        assert publisher.version == 0
        Root.store = store  # type: ignore[method-assign]
        publisher.publish(params(3), version=3, wait=True)
        with pytest.raises(MismatchError, match="without leaves"):
            publisher.publish({} if own.process == 0 else params(4), version=4)
        for version in range(5, 9):  # none of which tells it again
            publisher.publish(params(version), version=version)


def differing() -> None:
    """One process publishes another version, or makes another publisher: nothing is published."""
    with Publisher(own.root) as publisher:
        publisher.publish(params(0), version=0, wait=True)
        match = (
            r"found publish\(version=1\) in process 0 where process 1 called publish\(version=2\)"
        )
        with pytest.raises(DifferingCallsError, match=match):
            publisher.publish(params(1), version=1 + own.process, wait=True)
        with pytest.raises(DifferingCallsError, match=match):
            publisher.publish(params(3), version=3, wait=True)
    match = r"found Publisher\(base_every=3, .* where process 1 called Publisher\(base_every=4"
    with pytest.raises(DifferingCallsError, match=match):
        Publisher(own.root, base_every=3 + own.process)
    (here := Path(f"{own.out}-of-{own.process}")).mkdir()
    os.chdir(here)
    with pytest.raises(MismatchError, match="it is another place here"):
        Publisher("/proc/self/cwd/weights")
    with Publisher(own.root) as publisher:
        given = params(1) | ({"more": params(1)["one"]} if own.process else {})
        with pytest.raises(MismatchError, match="expected the same params in all processes"):
            publisher.publish(given, version=1, wait=True)
        publisher.publish(params(1), version=1, wait=True)
    leaving = pytest.raises(ZeroDivisionError if own.process else DifferingCallsError)
    with leaving as found, Publisher(own.root) as publisher:
        publisher.publish(params(2), version=2, wait=True)
        if own.process:
            raise ZeroDivisionError  # as a loop may, in a program that goes on
        publisher.publish(params(3), version=3)
    assert own.process or "where process 1 called close()" in str(found.value)


def taken_over() -> None:
    """Another publisher takes the root over: all learn it, and for good."""
    with Publisher(own.root) as publisher:
        publisher.publish(params(0), version=0, wait=True)
        with Publisher(own.root) as other:
            other.publish(params(1), version=1, wait=True)
            for version in (1, 2):
                with pytest.raises(StorageError, match="has taken it over"):
                    publisher.publish(params(version), version=version, wait=True)
            other.publish(params(2), version=2, wait=True)


def expect(params: dict[str, Any], version: int) -> None:
    """Compares what this process has of some params with those of a version."""
    wanted = moving(version)
    for name, array in params.items():
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == wanted[name][shard.index].tobytes(), name


def heed_one(
    follower: Follower, publisher: Publisher, failing: list[Exception], is_late: list[bool]
) -> None:
    """What one process alone meets costs no version: another way, a pause, a flipped bit."""
    publisher.publish(params(7), version=7, wait=True)
    if own.process == 1:
        is_late.append(True)  # a look that finds no way but from a base
    expect(follower.latest(), 7)
    publisher.publish(params(8), version=8, wait=True)
    if own.process == 1:
        failing += [StorageError("away")]
    expect(follower.wait_for(8, timeout_s=100), 8)
    publisher.publish(params(9), version=9, wait=True)
    apply, spoiled = Weights.apply, [own.process == 1]

    def spoiling(self: Weights, changes: Any) -> None:
        apply(self, changes)
        if spoiled and spoiled.pop():
            self.words[0, 4][0] ^= 1

    Weights.apply = spoiling  # type: ignore[method-assign]
    expect(follower.latest(), 9)
    assert follower.version == 9
    assert own.process == 0 or "expected the bits that were published" in follower.problem


def follow() -> None:
    """All follow on another mesh, also where one of them cannot read something."""
    mesh, load = jax.make_mesh((own.devices, own.processes), ("x", "y")), Root.load
    failing, loads = list[Exception](), list[Any]()
    routed, is_late = VersionReader.route, list[bool]()

    def loading(root: Root, place: Any, stored: Any) -> bytes:
        loads.append(place)
        if failing:
            raise failing.pop()
        return load(root, place, stored)

    def routing(reader: VersionReader, have: Any, last: Any = None) -> Any:
        return routed(reader, None if is_late and is_late.pop() else have, last)

    Root.load = loading  # type: ignore[method-assign]
    VersionReader.route = routing  # type: ignore[method-assign]
    specs = {"cut": PartitionSpec("y"), "large": PartitionSpec(None, "y")}
    kinds = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, specs.get(name, PartitionSpec()))
        )
        for name, x in moving(0).items()
    }
    follower = Follower(own.root, kinds, poll_s=0.01)
    assert not follower.update()
    with Publisher(own.root, base_every=3) as publisher:
        for version in range(3):
            publisher.publish(params(version), version=version, wait=version != 1)
            expect(follower.wait_for(version, timeout_s=100), version)
            assert follower.version == version
        with pytest.raises(LineageError, match=r"version 9 within 0\.1 seconds, found 2"):
            follower.wait_for(9, timeout_s=0.1)
        for array in () if own.process else follower.params.values():
            array.delete()
        expect(follower.params, 2)
        assert follower.bases_read == 1
        if own.process == 1:
            failing += [GoneError("pruned")]  # once, so another look finds it
        publisher.publish(params(3), version=3, wait=True)  # with a base
        expect(follower.latest(), 3)
        assert follower.bases_read == 2 - own.process  # whose copy was not touched
        publisher.publish(params(4), version=4, wait=True)
        if own.process == 1:
            failing += [IntegrityError("damaged"), IntegrityError("damaged")]
        loads.clear()
        expect(follower.latest(), 3)
        assert not failing
        assert len(loads) < 10, "all refuse what one has refused"
        for version in (5, 6):
            publisher.publish(params(version), version=version, wait=True)
        expect(follower.wait_for(6, timeout_s=100), 6)
        heed_one(follower, publisher, failing, is_late)
    match = r"wait_for\(9\) in process 0 where process 1 called update"
    with pytest.raises(DifferingCallsError, match=match):
        _ = follower.update() if own.process else follower.wait_for(9)
    expect(follower.params, 9)


def drifted() -> None:
    """One process, or a device of one, has other bits of what all have: nothing is published."""
    with Publisher(own.root) as publisher:
        publisher.publish(params(0), version=0, wait=True)
        found = (("small", 1, 0), ("large", 1, 1), ("large", 0, 1))
        for version, (name, process, device) in enumerate(found, start=1):
            given = params(version)
            array = given[name]
            shards = [np.array(each.data) for each in array.addressable_shards]
            if own.process == process:
                shards[device].view(np.uint8).reshape(-1)[0] ^= 1
            pairs = zip(shards, array.addressable_shards, strict=True)
            placed = [jax.device_put(data, each.device) for data, each in pairs]
            shape, sharding = array.shape, array.sharding
            given[name] = jax.make_array_from_single_device_arrays(shape, sharding, placed)
            publisher.publish(given, version=version)
            match = rf"version {version}: 1 box of 1 leaf .* {name}"
            with pytest.raises(ReplicaError, match=match):
                publisher.wait()
            assert publisher.version == 0
        publisher.publish(params(4), version=4, wait=True)


def endless() -> None:
    """Publishes versions until it is killed."""
    publisher = Publisher(own.root, base_every=3, keep_versions=4)
    for version in itertools.count((publisher.version or 0) + 1):
        publisher.publish(params(version), version=version)


if __name__ == "__main__":
    modes = (publish, refused, differing, taken_over, follow, drifted, endless)
    {mode.__name__: mode for mode in modes}[own.mode]()
    multihost_utils.sync_global_devices("the end")  # process 0 has the service for all
    Path(f"{own.out}-{own.process}").write_text("done")
