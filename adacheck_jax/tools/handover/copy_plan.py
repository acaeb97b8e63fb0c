"""Plan of a copy: step directories in the order in which they are copied, and their parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import deletion, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.steps import resolved, steps_under

COPIED, THERE, REFUSED, DELETED = "copied", "there", "refused", "deleted meanwhile"


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step directory.

    Attributes:
        name: its name under the root.
        result: ``copied``, ``there`` if the copy has it already, ``refused``, or ``deleted
            meanwhile`` if it was before it could be copied.
        why: reason why it was refused; else None.
        is_added: True if it was not asked for, and another step builds on it.
        written_bytes: bytes of its files that were written: no links, and nothing that was there.
        found_bytes: bytes that an interrupted copy had written.
        plain_bytes: bytes that a copy of every link as a file of its own would have taken.
    """

    name: str
    result: str
    why: str | None = None
    is_added: bool = False
    written_bytes: int = 0
    found_bytes: int = 0
    plain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Steps to copy.

    Attributes:
        rows: step directories in the order of their numbers; the result of one that can be copied
            is empty.
        needs: names of the step directories that each one reads files of.
        lineages: lineages of the deltas in each step directory, by the items' paths below the root.
    """

    rows: Sequence[CopiedStep]
    needs: Mapping[str, set[str]]
    lineages: Mapping[str, Mapping[str, Lineage]]


def plan(root: Location, names: Sequence[str]) -> CopyPlan:
    """Plans a copy of some step directories under a root with all that they need.

    Args:
        root: the root, not in a view that was listed before.
        names: names of step directories; none for all.

    Raises:
        InputError: there is no step of ours.
    """
    rows: dict[str, CopiedStep] = {}
    needs: dict[str, set[str]] = {}
    lineages: dict[str, dict[str, Lineage]] = {}
    for step, lineage in resolved(steps_under(root)):
        item = at(step.directory).below(root)
        name = item.partition("/")[0]
        rows.setdefault(name, CopiedStep(name, ""))
        if isinstance(lineage, StepDeletedError):
            rows[name] = CopiedStep(name, DELETED)
        elif isinstance(lineage, AdaCheckError):
            rows[name] = CopiedStep(name, REFUSED, " ".join(str(lineage).split()))
            if not root.on_file_system and deletion.is_deleted(root / name):  # the view is older
                rows[name] = CopiedStep(name, DELETED)
        else:
            holders = {name_of(root, each.holder) for each in lineage.entries}
            needs.setdefault(name, set()).update(holders - {name})
            if isinstance(lineage.manifest, DeltaManifest):
                lineages.setdefault(name, {})[item] = lineage
    for places in roots.stock_steps(root).values():
        name = name_of(root, places[0])
        rows[name] = CopiedStep(
            name, REFUSED, "stock Orbax saved it: cp -r copies it, or a tool of the bucket"
        )
    for name in names:
        if name not in rows:
            is_deleted = deletion.is_deleted(root / name)
            found = CopiedStep(name, REFUSED, "found no committed step there")
            rows[name] = CopiedStep(name, DELETED) if is_deleted else found
    chosen, waiting = set[str](), [*(names or rows)]
    while waiting:
        chosen.add(name := waiting.pop())
        waiting += needs.get(name, set()) - chosen
    numbers = {name: roots.place_of(root / name, in_step=False).step or 0 for name in chosen}
    ordered = sorted(chosen, key=lambda name: (numbers[name], name))
    rows = {n: replace(rows[n], is_added=bool(names) and n not in names) for n in ordered}
    return CopyPlan([*rows.values()], needs, lineages)


def name_of(root: Location, item: AnyPath) -> str:
    """Name of the step directory of an item."""
    return at(item).below(root).partition("/")[0]
