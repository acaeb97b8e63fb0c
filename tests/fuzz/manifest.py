"""Fuzzes what reads manifests: ``python -m tests.fuzz.manifest --count 1000000``.

An input is a base's and a delta's manifest. They are changed as JSON, and get checksums that fit,
so that what stands behind the checksum is reached; some are changed as bytes. They are decoded,
laid out as a root and resolved, and the delta's packs are planned. An accepted plan must lie inside
its packs.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adacheck_jax.format import manifest, manifest_json, manifest_records, pack_plan
from adacheck_jax.format.encodings.form import MAX_HEAD_BYTES, Encoding
from adacheck_jax.format.manifest_records import MAX_STATE_BYTES
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.store.steps import lookup, manifest_file
from tests.fuzz import engine

CORPUS = Path(__file__).parent / "corpus" / "manifest"

NUMBERS = [0, 1, 2, 3, 7, 255, 256, 4096, 2**16, 2**20, 2**31, 2**32, 2**40, 2**53, 2**59, 2**60]
NUMBERS += [2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000, -1, -(2**63)]
ODD = [None, True, False, 0.0, 1.5, -0.0, 1e308, float("inf"), float("nan"), [], {}, "", [[]], [{}]]
TEXTS = [
    *(
        "\ud800",
        "\0",
        "\x1b[2J",
        "x" * 5000,
        "f" * 16,
        "0" * 64,
        "\u202e",
        "ä",
        "key<fry>",
        "key<>",
    ),
    *("r16", "V8", "object", "O", "S4", "float128", "int4", "complex64", "bfloat16", "bool", "f4"),
    *("..", "../10", "../../10/x", "/etc", "../../../etc", ".", "a/../..", "../cpu", "0", "cpu"),
    *(*Encoding, "base", "delta"),
]


class Manifests:
    """The target."""

    def __init__(self) -> None:
        shared_memory = Path("/dev/shm")
        place = shared_memory if shared_memory.is_dir() else None
        self._root = Path(tempfile.mkdtemp(prefix="adacheck-fuzz-", dir=place))
        atexit.register(shutil.rmtree, self._root, ignore_errors=True)
        for step in ("10", "11"):
            (self._root / step / manifest_file.DIRECTORY).mkdir(parents=True)
        self._seeds = [json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))]

    def seeds(self) -> list[Any]:
        """The committed corpus."""
        return [json.dumps(each) for each in self._seeds]

    def save(self, case: Any, path: Path) -> None:
        """Writes an input."""
        path.with_suffix(".json").write_text(case if isinstance(case, str) else repr(case))

    def mutate(self, rng: random.Random, population: list[Any]) -> Any:
        """Changes one input in a few places."""
        text = population[min(int(rng.expovariate(0.05)), len(population) - 1) * -1 - 1]
        if rng.random() < 0.5:
            text = rng.choice(population)
        case = json.loads(text)
        try:
            for _ in range(min(1 + int(rng.expovariate(0.7)), 8)):
                _change(rng, case, population)
            if rng.random() < 0.2:
                _mend(rng, case)
            return json.dumps(case)
        except (RecursionError, ValueError):
            return text

    def run(self, case: Any) -> None:
        """Decodes, resolves and plans."""
        body = json.loads(case)
        if not isinstance(body, dict):
            body = {}
        rng = random.Random(len(case))
        base_bytes = _file(body.get("base"), rng)
        base = manifest_json.decode(base_bytes, where="base")
        delta_body = body.get("delta")
        parent = delta_body.get("parent") if isinstance(delta_body, dict) else None
        if isinstance(parent, dict) and body.get("fits", True):
            parent["checksum"] = base.checksum
        delta_bytes = _file(delta_body, rng)
        for step, data in (("10", base_bytes), ("11", delta_bytes)):
            (self._root / step / manifest_file.FILE).write_bytes(data)
        found = lookup.resolve(self._root / "11")
        for delta, reader in zip(found.deltas, delta_reader.readers_of(found), strict=True):
            assert reader.delta == delta
            _check_plan(reader.leaves, delta)


def _file(body: Any, rng: random.Random) -> bytes:
    """A manifest's file: with a checksum that fits, or with changed bytes."""
    if not isinstance(body, dict):
        return json.dumps(body).encode()
    damage = body.pop("_bytes", None)
    data = json.dumps({**body, "checksum": manifest_json.checksum_of(body)}).encode()
    if damage is not None:
        rng = random.Random(repr(damage))
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed))
            piece = rng.choice(
                [b"1e400", b"[", b"{", b'"', b"9" * 5000, b",", b"\xff", b"-", b"NaN"]
            )
            changed[at : at + rng.randint(0, 3)] = piece
        data = bytes(changed)
    return data


def _check_plan(leaves: Sequence[manifest.Leaf], delta: manifest.Delta) -> None:
    """What a reader relies on when it allocates and reads."""
    for extent in pack_plan.plan_of(leaves, delta).extents:
        leaf, pack = leaves[extent.leaf], delta.packs[extent.process]
        assert all(
            0 <= a <= b <= n
            for a, b, n in zip(extent.box.start, extent.box.stop, leaf.shape, strict=True)
        )
        assert extent.size_bytes <= leaf.nbytes + MAX_HEAD_BYTES
        assert leaf.nbytes <= MAX_STATE_BYTES
        assert 0 <= extent.raw_start <= extent.raw_start + extent.raw_bytes <= pack.raw_bytes
        end = extent.compressed_start + extent.compressed_bytes
        assert 0 <= extent.compressed_start <= end <= pack.compressed_bytes
        assert min(extent.raw_bytes, extent.compressed_bytes) >= 0


def _mend(rng: random.Random, case: Any) -> None:
    """Makes what was changed fit together again, so that more of it is believed."""
    try:
        leaves = case["base"]["leaves"]
        for leaf in leaves:
            leaf["shape"] = [points[-1] for points in leaf["cuts"]]
            count = 1
            for points in leaf["cuts"]:
                count *= max(1, len(points) - 1)
            if len(leaf["owners"]) != count and count < 5000:
                leaf["owners"] = [rng.randrange(2) for _ in range(count)]
            leaf["itemsize_bytes"] = manifest.ITEMSIZES_BYTES.get(leaf["dtype"], 4)
        owners = [owner for leaf in leaves for owner in leaf["owners"]]
        case["base"]["process_count"] = max([0, *owners]) + 1
        for which in ("base", "delta"):
            prints = case[which]["fingerprints"]
            case[which]["fingerprints"] = (prints + ["0" * 16] * len(leaves))[: len(leaves)]
        packs = case["delta"]["packs"]
        base = manifest_json.decode(_file(dict(case["base"]), rng), where="")
        assert isinstance(base, manifest.BaseManifest)
        leaves = base.leaves
        if grids := case["delta"].get("grids"):
            for grid, leaf in zip(grids, case["base"]["leaves"], strict=False):
                for points, length in zip(grid["cuts"], leaf["shape"], strict=False):
                    points[:] = sorted({0, length, *(x for x in points if 0 < x < length)})
            read = [manifest_records.record(manifest.Grid, grid) for grid in grids]
            pairs = zip(leaves, read, strict=True)
            leaves = [dataclasses.replace(x, cuts=y.cuts, owners=y.owners) for x, y in pairs]
        plan = pack_plan.plan_delta(
            leaves,
            case["delta"]["stored"],
            [pack["encodings"] for pack in packs],
            [pack["aliases"] for pack in packs],
            [pack["coded"] for pack in packs],
        )
        for pack, raw, compressed in zip(packs, plan.raw_bytes, plan.compressed_bytes, strict=True):
            pack["raw_bytes"], pack["compressed_bytes"] = raw, compressed
    except Exception:
        return  # it stays as it is


def _pick(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """A random place: what holds it, and its key there."""
    while True:
        key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
        child = value[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.15:
            return value, key
        value = child


def _any(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(TEXTS)
    if kind < 0.95:
        return rng.choice(ODD)
    deep: Any = []
    for _ in range(rng.choice([5, 5, 5, 50, 50, 900])):
        deep = [deep]
    return deep


def _change(rng: random.Random, case: Any, population: list[Any]) -> None:  # noqa: PLR0912
    if not case:
        return
    holder, key = _pick(rng, case)
    value = holder[key]
    kind = rng.randrange(12)
    if kind <= 2:
        holder[key] = _any(rng)
    elif kind == 3 and isinstance(holder, list):
        del holder[key]
    elif kind == 4 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(value)))
    elif kind == 5 and isinstance(value, list) and len(value) * 8 < 3000:
        value *= rng.choice([2, 3, 8])
    elif kind == 6 and type(value) is int and abs(value) < 2**70:
        holder[key] = value + rng.choice([-1, 1, 2, -2, value, 1 << rng.randrange(64)])
    elif kind == 7:
        other, other_key = _pick(rng, case)
        if not isinstance(value, dict | list) and not isinstance(other[other_key], dict | list):
            holder[key], other[other_key] = other[other_key], value
    elif kind == 8:
        donor_holder, donor_key = _pick(rng, json.loads(rng.choice(population)))
        same = isinstance(holder, dict) and isinstance(donor_holder, dict) and key in donor_holder
        holder[key] = donor_holder[key if same else donor_key]
    elif kind == 9 and isinstance(holder, dict) and rng.random() < 0.3:
        del holder[key]
    elif kind == 10 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        holder[key] = (
            value[:at] + rng.choice(["", "=", "x", "r", "..", "/", "\0", "ä"]) + value[at + 1 :]
        )
    elif kind == 11 and isinstance(value, list) and value and all(type(v) is int for v in value):
        top = max(value)
        count = rng.choice([1, 3, 30])
        value += sorted(top + rng.randint(0, 1 << rng.randrange(1, 40)) for _ in range(count))
    elif isinstance(case, dict) and rng.random() < 0.1:
        which = rng.choice(["base", "delta"])
        if isinstance(case.get(which), dict):
            case[which]["_bytes"] = rng.random()
    elif isinstance(case, dict) and rng.random() < 0.02:
        case["fits"] = False


if __name__ == "__main__":
    engine.main(Manifests())
