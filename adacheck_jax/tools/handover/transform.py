"""A recorded step in another layout, as a base in a new root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.adapter.manager import save_base
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.wanted import relayout
from adacheck_jax.layout.plan import Plan
from adacheck_jax.layout.rules import Rule
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools import verification
from adacheck_jax.tools.handover import sources
from adacheck_jax.tools.handover.export import free_place, written_beside
from adacheck_jax.tools.recompute import wide_integers
from adacheck_jax.tools.steps import RecordedSteps, undeleted


@dataclass(frozen=True, slots=True)
class TransformReport:
    """The output of ``adacheck transform``.

    Attributes:
        root: the checkpoint root.
        destination: the new root; what it would be for a dry run.
        step: step number.
        is_dry_run: True if nothing was written.
        trees: paths of the trees that rules were applied to.
        changed: the leaves that rules take: data type and shape by leaf path.
        made: the leaves that rules give, likewise.
        untouched: leaf paths of the leaves that no rule concerns.
        proved: False if a rule may lose something (``lossy``, ``average``), so that its inverse
            cannot be compared.
        rounds_otherwise: True if the optimizer adds up elements, so that training in the new layout
            equals training in the old one to rounding only.
    """

    root: str
    destination: str
    step: int
    is_dry_run: bool
    trees: tuple[str, ...]
    changed: dict[str, str]
    made: dict[str, str]
    untouched: tuple[str, ...]
    proved: bool
    rounds_otherwise: bool


def transform(
    root: AnyPath,
    target: str,
    rules: Sequence[Rule],
    number: int | None,
    item: str | None = None,
    *,
    dry_run: bool = False,
) -> TransformReport:
    """Restore a recorded step, give it another layout, and save it as a base in a new root.

    Raises:
        InputError: there is no such root, step or item, or something is at the target.
        MismatchError: a rule does not fit the leaves, or loses bits and does not say so.
        AdaCheckError: the step is damaged.
    """
    path = free_place(target, root)
    found = RecordedSteps(root, item).find(number)
    base = found.lineage.base
    plan = relayout.planned(rules, base)
    if not dry_run:
        dtypes = (kind.dtype for kind in plan.kinds)
        with wide_integers(dtypes), written_beside(path) as new:
            with undeleted(found.directory):
                state = sources.restored(found, StockCheckpoints(), rules).state
            name = found.directory.name
            save_base(str(new), found.number, state, name)
            verification.check(new / str(found.number) / name, read_data=True)
    return TransformReport(
        root=str(root),
        destination=str(path),
        step=found.number,
        is_dry_run=dry_run,
        trees=plan.trees,
        changed=_described(plan, plan.inputs),
        made=_described(plan, plan.outputs),
        untouched=tuple(plan.untouched),
        proved=all(plan.inverted(each) is not None for each in plan.components()),
        rounds_otherwise=relayout.adds_up(base),
    )


def _described(plan: Plan, values: Mapping[str, int]) -> dict[str, str]:
    """Data types and shapes of the leaves that rules concern, by leaf path."""
    untouched = frozenset(plan.untouched)
    kinds = {path: plan.kinds[value] for path, value in values.items() if path not in untouched}
    return {path: f"{kind.dtype}{list(kind.shape)}" for path, kind in kinds.items()}
