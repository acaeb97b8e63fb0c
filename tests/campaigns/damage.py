"""Random damage to the files of one step, done to a working copy and undone again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Damage:
    """What was done.

    Attributes:
        kind: one of :data:`KINDS`.
        place: relative to the root.
        steps: the steps that it may have touched.
        detail: for people.
    """

    kind: str
    place: str
    steps: tuple[int, ...]
    detail: str = ""


def _flip(rng: random.Random, data: bytearray) -> str:
    if not data:
        data.append(1)
        return "of an empty file"
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} of {8 * len(data)}"


def _letter(rng: random.Random, data: bytearray) -> str:
    """One character for another of its kind, so that a text file stays well-formed."""
    kinds = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz")
    places = [i for i, byte in enumerate(data) if any(byte in kind for kind in kinds)]
    if not places:
        return "nothing to change"
    i = rng.choice(places)
    kind = next(kind for kind in kinds if data[i] in kind)
    old, data[i] = data[i], rng.choice(kind)
    return f"byte {i}: {chr(old)} -> {chr(data[i])}"


def _truncate(rng: random.Random, data: bytearray) -> str:
    size = len(data)
    del data[rng.randrange(size) if size else 0 :]
    return f"{size} -> {len(data)} bytes"


def _empty(_: random.Random, data: bytearray) -> str:
    data.clear()
    return ""


def _zero_page(rng: random.Random, data: bytearray) -> str:
    """One page, as a lost write leaves it."""
    start = PAGE_BYTES * rng.randrange(1 + len(data) // PAGE_BYTES)
    stop = min(len(data), start + PAGE_BYTES)
    data[start:stop] = bytes(stop - start)
    return f"bytes {start} to {stop}"


CHANGES: dict[str, Callable[[random.Random, bytearray], str]] = {
    **{"bit flip": _flip, "character": _letter, "truncation": _truncate},
    **{"emptied": _empty, "zeroed page": _zero_page},
}
"""Changes of the bytes of a file."""
KINDS = (*CHANGES, "deletion", "file swap", "folder swap", "extra file")


class Patient:
    """A root whose files are damaged one at a time; other names of a file never see it.

    Args:
        root: a checkpoint manager's root, which belongs to the patient.
        steps: the steps in it.
    """

    def __init__(self, root: Path, steps: Sequence[int]) -> None:
        self._root = root
        self._steps = tuple(steps)
        self._aside = root.with_name(f"{root.name}.aside")
        self._undo: list[Callable[[], None]] = []

    def damage(self, rng: random.Random) -> Damage:
        """Does one thing at random to one random file (or folder) of one random step."""
        self._aside.mkdir()
        step, kind = rng.choice(self._steps), rng.choice(KINDS)
        own = self._root / str(step)
        # By place, and not by number of files: a lineage has many more of some than of others.
        by_folder: dict[Path, list[Path]] = {}
        for path in _files_of(own):
            by_folder.setdefault(path.parent, []).append(path)
        path = rng.choice(by_folder[rng.choice(sorted(by_folder))])
        if kind in CHANGES:
            data = bytearray(path.read_bytes())
            detail = CHANGES[kind](rng, data)
            self._take_away(path)
            path.write_bytes(data)
            return self._told(kind, path, detail)
        if kind == "deletion":
            self._take_away(path)
            return self._told(kind, path)
        if kind == "extra file":
            return self._extra(rng, own, path)
        if kind == "folder swap":
            # Each folder is consistent. Not all of a step: that would be a step of another name,
            # as whoever moves steps makes it.
            folders = [each for each in path.parents if own in each.parents]
            folders = [x for x in folders if x.parent != own and x.name != "adacheck"]
            path = rng.choice(folders or [path])
        return self._swap(rng, step, path, kind)

    def heal(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()
        shutil.rmtree(self._aside)

    def _take_away(self, path: Path) -> Path:
        """Moves a file or folder aside until the root is healed."""
        aside = self._aside / str(len(self._undo))
        path.rename(aside)

        def put_back() -> None:
            _remove(path)
            aside.rename(path)

        self._undo.append(put_back)
        return aside

    def _told(self, kind: str, path: Path, detail: str = "", other: int | None = None) -> Damage:
        relative = path.relative_to(self._root)
        steps = [int(relative.parts[0])] + ([] if other is None else [other])
        return Damage(kind, str(relative), tuple(steps), detail)

    def _swap(self, rng: random.Random, step: int, path: Path, kind: str) -> Damage:
        """Exchanges a file or folder with the one at the same place in another step."""
        others = [each for each in self._steps if each != step]
        rng.shuffle(others)
        for other in others:
            twin = self._root / str(other) / path.relative_to(self._root / str(step))
            if not twin.exists() and path.is_file() and twin.parent.is_dir():
                # Data files have random names: the one of the same rank.
                same = sorted(each for each in twin.parent.iterdir() if each.is_file())
                rank = sorted(path.parent.iterdir()).index(path)
                twin = same[rank] if rank < len(same) else twin
            if twin.exists():
                first, second = self._take_away(path), self._take_away(twin)
                _copy(second, path)
                _copy(first, twin)
                return self._told(kind, path, f"with step {other}", other)
        return self._told(kind, path, "no twin: nothing done")

    def _extra(self, rng: random.Random, own: Path, path: Path) -> Damage:
        """A file more, beside another one: noise, or a copy of it or of yet another."""
        names = ("extra", "manifest.ocdbt", "zarr.json", ".tmp", "process_1", "lineage", "7")
        drawn = rng.choice([*names, f"{path.name}.bak", f"{rng.getrandbits(128):x}"])
        target = path.with_name(drawn)
        source = rng.choice([None, path, rng.choice(_files_of(own))])
        if target.exists():
            target = path.with_name("another")
        self._undo.append(lambda: _remove(target))
        target.write_bytes(rng.randbytes(300) if source is None else source.read_bytes())
        return self._told("extra file", target)


def _files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        shutil.copyfile(source, target)
