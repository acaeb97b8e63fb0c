"""One run: trains, perturbs, saves; then restores every step that was saved, bit by bit.

Manifests are read as plain JSON, and what one of them lacks counts as absent, so that steps that
other releases wrote can be counted by the same program.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.state.exported_update import ExportedUpdates
from tests.campaigns import programs
from tests.campaigns.layouts import SHAPES, abstract_of, shardings_of
from tests.campaigns.plans import LAYOUTS, Event, Plan
from tests.support import SHADOWS

_ELSEWHERE = (*(name for name in SHAPES if not name.startswith(("data_", "explicit"))), "one")
_SHOWN = 400
"""Characters of an error that are kept."""
TRUTH = "truth.npz"
"""File of the bits of all steps, beside the root."""


class NotTrainable(Exception):
    """A train step that optax or JAX refuses."""


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"


@dataclass
class Outcome:
    """What one run gave.

    Attributes:
        seed, kinds, devices, text: of its plan.
        steps: that were trained and offered to be saved.
        counts: of steps that were ``saved`` (reported, recorded ones included, and kept), of these
            restored ``exact`` where they were saved, and ``other mesh``, ``exact there``,
            ``rounded there`` elsewhere; how all lie on disk, as ``bases``, ``replayed``, ``idle``
            (without an update) and ``bits``; ``whole leaves``, which the update computes and which
            replayed deltas hold all the same, and ``found by checks`` of these; bytes.
        found: problems, by kind: ``lost`` (reported as saved, and a restore raises), ``of a part``
            (the error names the leaf of which a part was edited, and no other), ``lost there`` (on
            another mesh), ``wrong`` (other bits), ``vanished`` (in no manifest), ``failed``
            (any exception but this library's), ``refused`` (an error at a save or the next wait),
            ``resumes failed``, ``refused and listed``, ``named a lost step``, ``nothing to fall
            back to``.
        dropped: recorded steps that went with a refused one.
        left_out: why no update is replayed; empty otherwise.
        share: largest difference of a leaf that is right to rounding only, as a share of the
            tolerance that the handler told.
        cpu_s: of the process.
    """

    seed: int
    kinds: Sequence[str]
    devices: int
    text: str
    steps: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    found: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    dropped: list[int] = field(default_factory=list)
    left_out: str = ""
    share: float = 0.0
    cpu_s: float = 0.0

    @property
    def line(self) -> str:
        """The run in one line."""
        parts = [f"{self.seed:>6} {self.devices}d"]
        parts += [f"{name} {self.counts[name]}" for name in ("saved", "exact")]
        parts += [f"{name.upper()} {len(each)}" for name, each in self.found.items()]
        kinds = " ".join(f"{self.counts[k]} {k}" for k in ("bases", "replayed", "idle", "bits"))
        return f"{' '.join(parts)} [{kinds}] {self.cpu_s:.1f}s {self.left_out} {self.text}"

    @property
    def json(self) -> dict[str, Any]:
        """As it is written to a file."""
        return vars(self) | {"found": {name: texts for name, texts in self.found.items() if texts}}


class Disk:
    """The manifests of all steps that a root ever held, also of those that are deleted since."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: dict[int, dict[str, Any]] = {}
        self.new_bytes: dict[int, int] = {}
        self._inodes: set[int] = set()

    def look(self) -> None:
        """Reads the manifests that are new."""
        for path in sorted(self.root.glob("*/default/adacheck/manifest.json")):
            name = path.parents[2].name
            if not name.isdecimal() or int(name) in self.manifests:
                continue
            try:
                self.manifests[int(name)] = json.loads(path.read_text())
                self.new_bytes[int(name)] = self._new_bytes(path.parents[2])
            except FileNotFoundError:  # it was deleted meanwhile
                continue

    def _new_bytes(self, directory: Path) -> int:
        total = 0
        for folder, _, names in os.walk(directory):
            for name in names:
                status = os.stat(os.path.join(folder, name))
                if status.st_ino not in self._inodes:
                    self._inodes.add(status.st_ino)
                    total += status.st_size
        return total

    def inside(self, step: int) -> list[int]:
        """The steps that were recorded and lie in a saved one, and those that it builds on."""
        found: list[int] = []
        while (manifest := self.manifests.get(step)) is not None:
            found += [each["step"] for each in manifest.get("recorded") or ()]
            if manifest.get("kind") != "delta":
                break
            step = manifest["parent"]["step"]
            found.append(step)
        return found

    def tell(self, outcome: Outcome, stored: frozenset[int]) -> None:
        """Counts steps by how they lie on disk.

        Args:
            outcome: takes the counts.
            stored: leaves that the update computes and deltas store by their class.
        """
        counts = outcome.counts
        for step, manifest in sorted(self.manifests.items()):
            if manifest.get("kind") == "base":
                counts["bases"] += 1
                counts["bytes"] += self.new_bytes.get(step, 0)
                continue
            counts["bytes"] += self.new_bytes.get(step, 0)
            update = self._update_of(step)
            if not update.get("programs"):
                outcome.left_out = update.get("problem") or "no program"
            passed = set(update.get("passed") or ())
            computed = {*(update.get("params") or ()), *(update.get("inner") or ())} - passed
            before = _counters(self.manifests.get(manifest["parent"]["step"], {}))
            for delta in (*(manifest.get("recorded") or ()), manifest):
                if delta.get("updates") or delta.get("has_update"):
                    counts["replayed"] += 1
                    held = computed & _held(delta)
                    counts["whole leaves"] += len(held)
                    counts["found by checks"] += len(held - stored)
                else:
                    is_idle = _counters(delta) == before and not _differences(delta)
                    counts["idle" if is_idle else "bits"] += 1
                before = _counters(delta)

    def _update_of(self, step: int) -> dict[str, Any]:
        manifest = self.manifests.get(step, {})
        while manifest.get("kind") == "delta":
            manifest = self.manifests.get(manifest["parent"]["step"], {})
        return manifest.get("update") or {}


def _counters(manifest: dict[str, Any]) -> Any:
    """The update counters, as either format version has them."""
    return manifest.get("counts", manifest.get("count"))


def _letters(delta: dict[str, Any], position: int) -> set[str]:
    return {pack["encodings"][position] for pack in delta.get("packs") or ()}


def _held(delta: dict[str, Any]) -> set[int]:
    stored = delta.get("stored") or ()
    return {leaf for position, leaf in enumerate(stored) if _letters(delta, position) - {"="}}


def _differences(delta: dict[str, Any]) -> bool:
    stored = delta.get("stored") or ()
    return any(_letters(delta, position) & {"x", "s"} for position in range(len(stored)))


def differing(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> int:
    """Leaves whose type, shape or bits differ."""
    pairs = zip(found, expected, strict=True)
    return sum(
        (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes() for a, b in pairs
    )


def relative(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of any leaf, relative to the largest absolute value in it."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if jax.numpy.issubdtype(b.dtype, jax.numpy.floating) and b.size:
            x, y = a.astype(np.float64), b.astype(np.float64)
            if largest := float(np.nanmax(np.abs(y), initial=0.0)):
                worst = max(worst, float(np.nanmax(np.abs(x - y), initial=0.0)) / largest)
    return worst


class Side:
    """One manager with its handler, and what is not known to be saved yet.

    Attributes:
        pending: the step whose save may still fail.
        recorded: the steps that the handler holds in memory.
        carried: those that are written with the pending one.
    """

    def __init__(self, plan: Plan, root: Path, recorder: Any, options: dict[str, Any]) -> None:
        self._make = lambda: _opened(plan, root, recorder, options)
        self.manager, self.handler = self._make()
        self.pending: int | None = None
        self.recorded: list[int] = []
        self.carried: list[int] = []

    def reopen(self) -> None:
        """As a process that was started anew."""
        self.manager.close()
        self.manager, self.handler = self._make()
        self.recorded = []


def _opened(
    plan: Plan, root: Path, recorder: Any, options: dict[str, Any]
) -> tuple[ocp.CheckpointManager, adacheck.AdaCheckHandler]:
    if plan.accumulates or plan.averages or plan.lookahead:  # other trees have the params' shapes
        options = {**options, "params_path": "params/fast" if plan.lookahead else "params"}
    delta: Any = plan.delta
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=plan.max_deltas, delta=delta, **options)
    kept = ocp.CheckpointManagerOptions(
        max_to_keep=plan.max_to_keep, save_interval_steps=plan.interval
    )
    return ocp.CheckpointManager(root, item_handlers=handler, options=kept), handler


class Run:
    """One run.

    Args:
        plan: what it does.
        root: an empty directory for its checkpoints.
        recording: for the recorder.
    """

    def __init__(self, plan: Plan, root: Path, recording: dict[str, Any]) -> None:
        self.plan = plan
        self.root = root
        self.recorder, self.tx, self.state = programs.initial_state(plan, recording)
        self.outcome = Outcome(plan.seed, plan.kinds, plan.devices, plan.text)
        self.outcome.counts["state bytes"] = sum(x.nbytes for x in programs.host_copy(self.state))
        self.disk = Disk(root)
        self.truth: dict[int, list[np.ndarray]] = {}
        self.reported: set[int] = set()
        self.unsaved: set[int] = set()  # a save, or the wait after it, raised
        self.step = programs.train_step_of(plan, self.tx, self.state)
        count = 2 if plan.turn else 1
        options = {"shadow": SHADOWS[plan.check]}
        self.sides = [Side(plan, root, self.recorder, options) for _ in range(count)]
        self.side = self.sides[0]
        self.copies: list[Any] = []
        self.rng = random.Random(f"choices {plan.seed}")
        self.edited_path, self.stored = "", frozenset[int]()
        self.batches = 0

    def go(self) -> Outcome:
        """Trains and saves, then restores."""
        start = time.process_time()
        for number in range(1, self.plan.steps + 1):
            self._turn(number)
            here = [event for event in self.plan.events if event.step == number]
            for event in here:
                if not event.after:
                    self._happen(event, number)
            self._train(number)
            for event in here:
                if event.after:
                    self._happen(event, number)
            self._save(number, last=number == self.plan.steps)
        self._end()
        self._restore_all()
        self.disk.tell(self.outcome, self.stored)
        self.outcome.cpu_s = time.process_time() - start
        return self.outcome

    def _train(self, number: int) -> None:
        if any(event.kind.startswith("rolled back") for event in self.plan.events):
            self.copies = [*self.copies[-3:], programs.device_copy(self.state)]
        self.batches += 1
        batch = programs.batch_of(self.plan, number, self.batches)
        types = [leaf.dtype for leaf in jax.tree.leaves(self.state)]
        try:
            self.state, loss = self.step(self.state, batch, number <= self.plan.frozen_until)
        except Exception as error:
            raise NotTrainable(short(error)) from error
        if types != [leaf.dtype for leaf in jax.tree.leaves(self.state)]:
            raise NotTrainable("training changes the data types of the state")
        if self.plan.ready:
            float(loss)
            jax.block_until_ready(self.state)

    def _turn(self, number: int) -> None:
        """The other handler's turn, or still the same one's."""
        if not self.plan.turn:
            return
        side = self.sides[(number - 1) // self.plan.turn % len(self.sides)]
        if side is not self.side:
            self._wait()
            self.outcome.dropped += self.side.recorded
            self.side.recorded = []
            self.side = side
            self.side.manager.reload()

    def _save(self, number: int, last: bool) -> None:
        """Records or saves the state, as training loops do."""
        side, outcome = self.side, self.outcome
        outcome.steps += 1
        try:
            recorded = self.plan.records and side.handler.record_step(self.state, number)
        except Exception as error:
            self._note(error, number, "record_step")
            recorded = False
            outcome.dropped += side.recorded  # the error names those that are lost
            side.recorded = []
        if recorded:
            side.recorded.append(number)
        if not recorded or last:
            self._wait()
            try:
                arguments = adacheck.SaveArgs(self.state)
                accepted = side.manager.save(number, args=arguments, force=last)
            except Exception as error:
                self._note(error, number, "save")
                self.unsaved.add(number)
                accepted = False
                outcome.dropped += side.recorded
                side.recorded = []
            if accepted:
                side.pending, side.carried, side.recorded = number, side.recorded, []
        self.truth[number] = programs.host_copy(self.state)
        self.disk.look()

    def _wait(self) -> None:
        """Waits for the pending save: only now is it known to be saved, or refused."""
        side = self.side
        step, side.pending = side.pending, None
        try:
            side.manager.wait_until_finished()
        except Exception as error:
            self._note(error, -1 if step is None else step, "wait")
            self.unsaved |= {step} - {None}
            self.outcome.dropped += [each for each in side.carried if each != step]
        else:
            if step is not None:
                self.reported |= {step, *side.carried}
                self.unsaved.discard(step)
        side.carried = []
        self.disk.look()

    def _note(self, error: Exception, step: int, where: str) -> None:
        if isinstance(error, adacheck.AdaCheckError):
            self.outcome.found["refused"].append(f"{where} of step {step}: {short(error)}")
        else:
            self.outcome.found["failed"].append(f"{where} of step {step}: {short(error)}")

    def _happen(self, event: Event, number: int) -> None:
        known: dict[str, Callable[[Event, int], None]] = {
            "rolled back": self._roll_back,
            "rolled back, counter on": self._roll_back,
            "trained unsaved": lambda *_: self._train(number),
            "swapped params": self._swap,
            "reset optimizer": self._reset,
            "resumed": self._resume,
            "resumed elsewhere": self._resume,
            "reopened": self._resume,
            "looked back": self._look_back,
            "went back": self._look_back,
        }
        known.get(event.kind, self._edit)(event, number)

    def _edit(self, event: Event, number: int) -> None:
        path = programs.target_of(self.state, event.kind)
        if path is None:
            return
        leaf = programs.leaves_of(self.state)[path]
        if event.kind in ("edited element", "edited row"):
            self.edited_path = path
            count = 1 if event.kind == "edited element" else leaf.shape[-1]
            start = self.rng.randrange(leaf.size // count) * count
            self.state = programs.edited(
                self.state,
                path,
                lambda x: x.ravel().at[start : start + count].add(0.01).reshape(x.shape),
            )
            return
        factors = {"diverged": float("nan"), "edited bias": 1.0, "edited leaf": 0.99}
        factor = 0.9 if event.kind.startswith("rate") else factors.get(event.kind, 0.5)
        offset = 0.01 if event.kind == "edited bias" else 0.0
        self.state = programs.edited(self.state, path, lambda x: x * factor + offset)

    def _roll_back(self, event: Event, number: int) -> None:
        depth = min(event.depth, len(self.copies))
        if not depth:
            return
        old = programs.device_copy(self.copies[-depth])
        if event.kind == "rolled back":
            self.state = old
            return
        # Trained again over other batches, unsaved, so that the counter is where it was.
        self.state = old
        for _ in range(depth):
            self._train(number)

    def _swap(self, event: Event, number: int) -> None:
        del event, number
        changed = jax.tree.map(lambda p: (p * 0.5).astype(p.dtype), self.state["params"])
        shardings = jax.tree.map(lambda p: p.sharding, self.state["params"])
        self.state = {**self.state, "params": jax.device_put(changed, shardings)}

    def _reset(self, event: Event, number: int) -> None:
        del event, number
        fresh = self.tx.init(self.state["params"])
        shardings = jax.tree.map(lambda x: x.sharding, self.state["opt"])
        self.state = {**self.state, "opt": jax.device_put(fresh, shardings)}

    def _resume(self, event: Event, number: int) -> None:
        """A new process: the last saved step is restored, and the run goes on from there.

        Or as it was in memory, where it is reopened.
        """
        del number
        self._wait()
        self.outcome.dropped += self.side.recorded
        self.side.reopen()
        if event.kind == "reopened":
            return
        if event.kind == "resumed elsewhere" and self.plan.program in ("fused", "two"):
            layouts = [each for each in LAYOUTS[self.plan.devices] if each != self.plan.layout]
            self.plan = dataclasses.replace(
                self.plan, layout=self.rng.choice(layouts or [self.plan.layout])
            )
            self.state = jax.device_put(self.state, shardings_of(self.state, self.plan.layout))
            self.copies = []
            self.step = programs.train_step_of(self.plan, self.tx, self.state)
        latest = self.side.manager.latest_step()
        if latest is not None:
            self._restored_here(latest, skip_damaged=True)

    def _look_back(self, event: Event, number: int) -> None:
        """Restores an earlier step with the handler that saves; the run may go on from there."""
        del number
        self._wait()
        steps = list(self.side.manager.all_steps())
        if not steps:
            return
        kept = programs.device_copy(self.state)
        self._restored_here(self.rng.choice(steps[-4:]), skip_damaged=False)
        if event.kind == "looked back":
            self.state = kept

    def _restored_here(self, step: int, *, skip_damaged: bool) -> None:
        """Puts a restored step in the place of the state; as it is where that fails."""
        side = self.side
        target = abstract_of(self.state, self.plan.layout)
        try:
            arguments = adacheck.RestoreArgs(target, skip_damaged=skip_damaged)
            state = side.manager.restore(step, args=arguments)
        except Exception as error:
            self.outcome.found["resumes failed"].append(f"step {step}: {short(error)}")
            return
        told = side.handler.restored.step if side.handler.restored else step
        if told != step:
            self.outcome.found["resumes failed"].append(f"step {step}: fell back to step {told}")
        if count := differing(programs.host_copy(state), self.truth[told]):
            self.outcome.found["wrong"].append(f"step {told} in the run: {count} leaves")
        self.state = state

    def _end(self) -> None:
        for side in self.sides:
            self.side = side
            self._wait()
            self.outcome.dropped += side.recorded
            side.manager.close()
        self.disk.look()

    def _restore_all(self) -> None:
        """Restores every step that was reported as saved and is kept, and compares all bits."""
        outcome, plan = self.outcome, self.plan
        handler = adacheck.AdaCheckHandler(self.recorder if plan.knows else None)
        with ocp.CheckpointManager(self.root, item_handlers=handler) as manager:
            listed = sorted(manager.all_steps())
            self._note_all("refused and listed", sorted(self.unsaved & set(listed)))
            wanted = self._wanted(listed)
            outcome.counts["saved"] = len(wanted)
            for step, holder in wanted.items():
                if self._try(manager, handler, step, holder, plan.layout):
                    outcome.counts["exact"] += 1
                    for each in plan.elsewhere:
                        others = [name for name in _ELSEWHERE if name != plan.layout]
                        layout = self.rng.choice(others) if each == "*" else each
                        outcome.counts["other mesh"] += 1
                        is_exact = self._try(manager, handler, step, holder, layout)
                        outcome.counts["exact there"] += is_exact
            if listed:
                self._ask_tools(manager, handler, listed)

    def _note_all(self, kind: str, steps: Sequence[int]) -> None:
        if steps:
            self.outcome.found[kind] += [f"step {step}" for step in steps]

    def _wanted(self, listed: list[int]) -> dict[int, int]:
        """The steps that must restore, each with the step that it is asked from."""
        wanted = {step: step for step in listed if step not in self.unsaved}
        for holder in listed:
            for step in self.disk.inside(holder):
                if step not in self.unsaved:
                    wanted.setdefault(step, holder)
        there = {s for m in self.disk.manifests for s in (m, *self.disk.inside(m))}
        if self.plan.max_to_keep is None:
            there = set(wanted)
        self._note_all("vanished", sorted(self.reported - there))
        return dict(sorted(wanted.items()))

    def _try(self, manager: Any, handler: Any, step: int, holder: int, layout: str) -> bool:
        found = self.outcome.found
        target = abstract_of(self.state, layout)
        here = layout == self.plan.layout
        try:
            arguments = adacheck.RestoreArgs(target, step=None if step == holder else step)
            state = manager.restore(holder, args=arguments)
        except Exception as error:
            message = short(error)
            found["lost" if here else "lost there"].append(f"step {step}, {layout}: {message}")
            if here and self._named(message) == {self.edited_path}:
                found["of a part"].append(f"step {step}")
            return False
        copies = programs.host_copy(state)
        count = differing(copies, self.truth[step])
        if count and handler.restored.rounded and not here:  # it said so
            self.outcome.counts["rounded there"] += 1
            share = relative(copies, self.truth[step]) / handler.restored.tolerance
            self.outcome.share = max(self.outcome.share, share)
        elif count:
            found["wrong"].append(f"step {step}, {layout}: {count} leaves")
        return not count

    def _named(self, message: str) -> set[str]:
        """The leaves that an error names."""
        paths = [path for path in programs.leaves_of(self.state) if "/" in path]  # no plain words
        words = set(re.findall(r"[\w/]+", message))
        return words.intersection(paths)

    def _ask_tools(self, manager: Any, handler: Any, listed: list[int]) -> None:
        """The newest step that can be restored, as two ways of asking tell it."""
        found = self.outcome.found
        lost = {int(each.split(",")[0].split()[1]) for each in found.get("lost", ())}
        try:
            if (named := adacheck.latest_restorable(self.root)) in lost:
                found["named a lost step"].append(f"step {named}")
        except Exception as error:
            found["failed"].append(f"latest_restorable: {short(error)}")
        args = adacheck.RestoreArgs(abstract_of(self.state, self.plan.layout), skip_damaged=True)
        try:
            state = manager.restore(listed[-1], args=args)
        except Exception as error:
            found["nothing to fall back to"].append(short(error))
            return
        told = handler.restored.step
        if differing(programs.host_copy(state), self.truth[told]):
            found["wrong"].append(f"step {told}, by fallback")

    def keep(self, folder: Path) -> None:
        """Leaves the bits of all steps beside the root, for :func:`restored_from`."""
        arrays = {
            f"{step}.{n}": np.frombuffer(leaf.tobytes(), np.uint8)
            for step, leaves in self.truth.items()
            for n, leaf in enumerate(leaves)
        }
        np.savez(folder / TRUTH, allow_pickle=False, **arrays)
        plan = dataclasses.replace(self.plan, events=())
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))


def restored_from(folder: Path, layouts: Sequence[str]) -> dict[str, str]:
    """Restores the steps of a run that another process made, and compares their bits.

    Args:
        folder: with the root ``root``, and what :meth:`Run.keep` wrote.
        layouts: where they are restored.

    Returns:
        For each layout nothing if all is exact, else what is not.
    """
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    _, _, state = programs.initial_state(dataclasses.replace(plan, layout="one"), {})
    handler, told = adacheck.AdaCheckHandler(), dict[str, str]()
    with (
        np.load(folder / TRUTH) as truth,
        ocp.CheckpointManager(folder / "root", item_handlers=handler) as manager,
    ):
        for layout in layouts:
            said = collections.Counter[str]()
            for step in manager.all_steps():
                args = adacheck.RestoreArgs(abstract_of(state, layout))
                try:
                    copies = programs.host_copy(manager.restore(step, args=args))
                except Exception as error:
                    said[short(error)] += 1
                    continue
                words = [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in copies]
                expected = [truth[f"{step}.{n}"] for n in range(len(words))]
                if count := differing(words, expected):
                    assert handler.restored is not None
                    as_told = "rounded, as told" if handler.restored.rounded else "DIFFER"
                    said[f"{as_told}: {count} leaves"] += 1
            told[layout] = "; ".join(f"{count} steps: {what}" for what, count in said.items())
    return told


def run(plan: Plan, root: Path, recording: dict[str, Any], keep: Path | None = None) -> Outcome:
    """Does one run; an exception of the training itself is part of what it gives."""
    logging.getLogger("adacheck_jax").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    outcome, classified = Outcome(plan.seed, plan.kinds, plan.devices, plan.text), []
    of = ExportedUpdates.of

    def noted(programs: Any, structure: Any) -> Any:
        classified.append(of(programs, structure))
        started.stored |= classified[-1].unreplayed  # by their classes, whatever a check would find
        return classified[-1]

    try:
        with mock.patch.object(ExportedUpdates, "of", noted):
            started = Run(plan, root, recording)
            outcome = started.outcome
            started.go()
            if keep is not None:
                started.keep(keep)
    except NotTrainable as error:
        outcome.left_out = f"not trainable: {error}"
    except Exception as error:
        outcome.found["failed"].append(f"the run itself: {short(error)}")
    return outcome
