"""One run of the campaign: trains, perturbs, saves; then restores every step that was saved."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from tests.campaigns import training_programs as programs
from tests.campaigns.layouts import abstract_of, shardings_of
from tests.campaigns.outcomes import Disk, Lost, Outcome, differing
from tests.campaigns.perturbations import LAYOUTS, Event, Plan

_ELSEWHERE = ("data", "sharded", "sharded_42", "sharded_24", "sharded_22", "one")
_SHOWN = 400
"""Characters of an error that are kept."""


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"


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
    if plan.accumulates or plan.averages:  # other trees have the params' shapes
        options = {**options, "params_path": "params"}
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
        options: for the handlers.
        recording: for the recorder.
    """

    def __init__(
        self, plan: Plan, root: Path, options: dict[str, Any], recording: dict[str, Any]
    ) -> None:
        self.plan = plan
        self.root = root
        self.recorder, self.tx, self.state = programs.initial_state(plan, recording)
        self.outcome = Outcome(plan.seed, plan.kinds, plan.devices, plan.text)
        self.outcome.state_bytes = sum(leaf.nbytes for leaf in programs.host_copy(self.state))
        self.disk = Disk(root)
        self.truth: dict[int, list[np.ndarray]] = {}
        self.reported: set[int] = set()
        self.unsaved: set[int] = set()  # a save, or the wait after it, raised
        self.step = programs.train_step_of(plan, self.tx, self.state)
        count = 2 if plan.turn else 1
        self.sides = [Side(plan, root, self.recorder, options) for _ in range(count)]
        self.side = self.sides[0]
        self.copies: list[Any] = []
        self.rng = random.Random(f"choices {plan.seed}")
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
        self.disk.tell(self.outcome)
        self.outcome.cpu_s = time.process_time() - start
        return self.outcome

    def _train(self, number: int) -> None:
        if any(event.kind.startswith("rolled back") for event in self.plan.events):
            self.copies = [*self.copies[-3:], programs.device_copy(self.state)]
        self.batches += 1
        batch = programs.batch_of(self.plan, number, self.batches)
        self.state, loss = self.step(self.state, batch, number <= self.plan.frozen_until)
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
            self.outcome.refused[step] = f"{where}: {short(error)}"
        else:
            self.outcome.failed.append(f"{where} of step {step}: {short(error)}")

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
            self.outcome.edited_path = path
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
            self.outcome.resumes_failed.append(f"step {step}: {short(error)}")
            return
        told = side.handler.restored.step if side.handler.restored else step
        if told != step:
            self.outcome.resumes_failed.append(f"step {step}: fell back to step {told}")
        if count := differing(programs.host_copy(state), self.truth[told]):
            self.outcome.wrong.append(f"step {told} in the run: {count} leaves")
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
            outcome.listed_though_refused = sorted(self.unsaved & set(listed))
            wanted = self._wanted(listed)
            outcome.saved = len(wanted)
            for step, holder in wanted.items():
                if self._try(manager, handler, step, holder, plan.layout):
                    outcome.exact += 1
                    if plan.elsewhere:
                        self._try_elsewhere(manager, handler, step, holder)
            if listed:
                self._ask_tools(manager, handler, listed)

    def _wanted(self, listed: list[int]) -> dict[int, int]:
        """The steps that must restore, each with the step that it is asked from."""
        outcome = self.outcome
        wanted = {step: step for step in listed if step not in self.unsaved}
        for holder in listed:
            for step in self.disk.inside(holder):
                if step not in self.unsaved:
                    wanted.setdefault(step, holder)
        anywhere = {s for m in self.disk.manifests for s in (m, *self.disk.inside(m))}
        outcome.vanished = sorted(self.reported - anywhere)
        if self.plan.max_to_keep is None:
            outcome.vanished = sorted(self.reported - set(wanted))
        return dict(sorted(wanted.items()))

    def _try(self, manager: Any, handler: Any, step: int, holder: int, layout: str) -> bool:
        outcome = self.outcome
        target = abstract_of(self.state, layout)
        inside = None if step == holder else step
        here = layout == self.plan.layout
        try:
            arguments = adacheck.RestoreArgs(target, step=inside)
            state = manager.restore(holder, args=arguments)
        except Exception as error:
            message = short(error)
            edited = self._named(message) == {outcome.edited_path}
            lost = Lost(step, holder, layout, message, edited)
            (outcome.lost if here else outcome.lost_elsewhere).append(lost)
            return False
        count = differing(programs.host_copy(state), self.truth[step])
        if count and handler.restored.rounded:  # it said so
            outcome.elsewhere_rounded += not here
            if here:
                outcome.wrong.append(f"step {step}, {layout}: {count} leaves, to rounding")
        elif count:
            outcome.wrong.append(f"step {step}, {layout}: {count} leaves")
        return not count

    def _named(self, message: str) -> set[str]:
        """The leaves that an error names."""
        paths = [path for path in programs.leaves_of(self.state) if "/" in path]  # no plain words
        words = set(re.findall(r"[\w/]+", message))
        return words.intersection(paths)

    def _ask_tools(self, manager: Any, handler: Any, listed: list[int]) -> None:
        """The newest step that can be restored, as two ways of asking tell it."""
        outcome = self.outcome
        lost = {each.step for each in outcome.lost}
        try:
            outcome.named = adacheck.latest_restorable(self.root)
            outcome.named_lost = outcome.named in lost
        except Exception as error:
            outcome.failed.append(f"latest_restorable: {short(error)}")
        target = abstract_of(self.state, self.plan.layout)
        try:
            state = manager.restore(
                listed[-1], args=adacheck.RestoreArgs(target, skip_damaged=True)
            )
        except Exception as error:
            outcome.fallback = short(error)
            return
        told = handler.restored.step
        outcome.fallback = str(told)
        if differing(programs.host_copy(state), self.truth[told]):
            outcome.wrong.append(f"step {told}, by fallback")

    def _try_elsewhere(self, manager: Any, handler: Any, step: int, holder: int) -> None:
        if self.plan.devices == 1:
            return
        others = [each for each in _ELSEWHERE if each != self.plan.layout]
        self.outcome.elsewhere += 1
        layout = self.rng.choice(others)
        self.outcome.elsewhere_exact += self._try(manager, handler, step, holder, layout)


def run(plan: Plan, root: Path, options: dict[str, Any], recording: dict[str, Any]) -> Outcome:
    """Does one run; an exception of the training itself is part of what it gives."""
    logging.getLogger("adacheck_jax").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    outcome = Outcome(plan.seed, plan.kinds, plan.devices, plan.text)
    try:
        started = Run(plan, root, options, recording)
        outcome = started.outcome
        return started.go()
    except Exception as error:
        outcome.failed.append(f"the run itself: {short(error)}")
        return outcome
