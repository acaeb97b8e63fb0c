"""Findings of a training run's saves, remembered, and what the user is told of them, once."""

from __future__ import annotations

import logging
from collections.abc import Collection

from adacheck_jax.format.manifest import Caution
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.save.pending import CAUSES, mismatch
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps import lineage
from adacheck_jax.update.recorder_state import find_nodes

_log = logging.getLogger(__name__)
_REASON_LENGTH = 1000


class Quarantine:
    """Findings of the checks of a run: once there is one, the run is cautious."""

    def __init__(self) -> None:
        self._reason = ""
        self._paths: frozenset[str] = frozenset()
        self._warned: frozenset[str] = frozenset()

    @property
    def is_cautious(self) -> bool:
        """True if every save is checked before it returns."""
        return bool(self._reason)

    def learn(self, reason: str, paths: Collection[str] = ()) -> None:
        """Notes leaves not to rely on, and the message of a finding, if it is the first one."""
        self._reason = self._reason or reason[:_REASON_LENGTH]
        self._paths |= frozenset(paths)

    def leaves_of(self, structure: Structure) -> frozenset[int]:
        """The leaves of a state whose replay is not relied on."""
        return frozenset(structure.index[path] for path in self._paths if path in structure.index)

    def caution(self, structure: Structure) -> Caution:
        """The findings, as a manifest keeps them."""
        return Caution(self._reason, tuple(sorted(self.leaves_of(structure))))

    def tell(self, plan: SavePlan, wrong: Collection[int]) -> None:
        """Notes leaves that replay gets wrong, and warns of those that are new."""
        structure, indices = plan.structure, sorted(wrong)
        text = mismatch(structure, indices)
        self.learn(f"step {plan.step}: {text}")
        paths = {structure.leaves[i].path for i in indices}
        if not paths.issubset(self._warned):
            self._warned |= paths
            _log.warning(
                "Step %d, and perhaps others after it: %s. They are stored as they are, and the "
                "other leaves are replayed. %s",
                *(plan.step, text, CAUSES),
            )


class Notices:
    """Warnings to the user, each given once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._unplanned_count = 0
        self._missed: tuple[int, str] | None = None

    def warn_once(self, message: str, key: str = "") -> None:
        """Warns, unless a warning with the same key was given before."""
        if (key or message) not in self._said:
            self._said.add(key or message)
            _log.warning("%s", message)

    def note_plan(self, plan: SavePlan) -> None:
        """Tells the notices of a plan, and warns where two bases in a row were not planned."""
        decision = plan.decision
        for message in decision.notices:
            self.warn_once(message)
        if not decision.is_base:
            self._unplanned_count = 0
        self._unplanned_count += not decision.is_planned
        if self._unplanned_count >= 2 and not decision.is_planned:
            remedies = (text for key, text in _REMEDIES.items() if key in decision.reason)
            remedy = next(remedies, "See the log.")
            self.warn_once(
                f"Steps are saved as full states, one after another, and not as deltas: at step "
                f"{plan.step} since {decision.reason}. {remedy}",
                key=remedy,  # the reason has other numbers at each step
            )

    def hint_at_recorder(self, structure: Structure, *, is_first: bool) -> None:
        """Warns where a handler without a recorder saves a record, or more than one step."""
        if nodes := find_nodes(list(structure.index)):
            self.warn_once(
                f"Every step is saved as a full state: the state holds a Recorder's record at "
                f"{nodes[0].prefix!r}, but the handler was given no recorder. Give it: "
                "checkpoint_manager(root, recorder), or AdaCheckHandler(recorder)."
            )
        elif not is_first:
            self.warn_once(
                "Every step is saved as a full state, since the handler was given no recorder: "
                "wrap the optimizer in adacheck.Recorder and give it, or save differences with "
                'delta="bits"; max_deltas=0 says that full states are meant.'
            )

    def note_step(self, step: int, why_not: str = "") -> None:
        """Notes a step that is saved or deferred, or has to be saved; warns of one that was not."""
        missed, self._missed = self._missed, (step, why_not) if why_not else None
        if missed is not None and missed[0] < step:
            self.warn_once(
                f"Step {missed[0]} was neither recorded nor saved: record_step answered False "
                f"({missed[1]}), and no save followed, which save_interval_steps may refuse. "
                "Where record_step answers False, save with manager.save(..., force=True).",
                key="gap",  # the message has another number for each step
            )

    def forget_missed(self) -> None:
        """Notes that a save of that step was asked for, and refused with an error."""
        self._missed = None


def tell_given_up(steps: Collection[int], why: str) -> None:
    """Warns of deferred steps that will not be saved, unless another warning says why."""
    if steps and why:
        shown = lineage.shown_steps([*steps])
        _log.warning("Recorded steps that are not saved: %s; %s.", shown, why)


_REMEDIES = {
    "the update counter": "Save or record (record_step) every step that makes an update; of two "
    "handlers that take turns each sees every second step alone. Where one compiled call makes "
    'several updates (a scan over minibatches), save differences: delta="bits".',
    "does not follow": "Give steps ascending numbers, and each training run a root and a handler "
    "of its own.",
    "no parent step": "The newest step is deleted before the next one is saved, or another handler "
    "or process writes to this root: give each training run a root and a handler of its own.",
    "the tree changed": "Save states of one structure.",
    "the state has": "Save states of one structure.",
    "changed from": "Save states of one structure.",
    "the sharding of": "Keep the shardings of the state: give the train step's jit out_shardings.",
}
