"""The reports of all processes on one save, judged: whether the step may be committed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from adacheck_jax.device.replicas import Verdict
from adacheck_jax.errors import AdaCheckError, MismatchError, ReplayError, ReplicaError
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.memory import shadow
from adacheck_jax.processes.messages import Report
from adacheck_jax.save import pending
from adacheck_jax.save.one_save import Save
from adacheck_jax.save.pending import Pending
from adacheck_jax.state.snapshot import Structure

_NEXT = "The next save is a base, and from then on all processes store these leaves."


def validated(save: Save, reports: Sequence[Report]) -> Report:
    """The answer to the reports of all processes; raises where the step may not be committed."""
    step = save.own.step
    for what in ("is_base", "becomes_base", "parent", "numbers"):
        if any(report[what] != reports[0][what] for report in reports):
            found = ", ".join(f"{report[what]} in process {n}" for n, report in enumerate(reports))
            raise AdaCheckError(
                f"step {step}: the {len(reports)} processes did not decide alike: {what} is "
                f"{found}. Expected all of them to see the same root, and to give their handlers "
                "the same options; check that it is a shared file system. The step is not saved; "
                "the next one will be a base."
            )
    before, verdicts = save.parent.end.fingerprints if save.parent else (), list[Verdict]()
    differing = False
    for each, own in zip(save.steps, by_step(reports), strict=True):
        _validate_local(each.step, own, save.structure)
        verdicts.append(save.replicas.settle(each.step, [report["replicas"] for report in own]))
        _validate_sampled(each, own, verdicts[-1])
        last, before = before, fingerprints_of(own)
        _validate_unchanged(save, each, last, before)
        _validate_healed(save, each, own)
        differing |= _validate_replayed(save, each, own, before)
    cautions, known = [report["caution"] for report in reports], save.structure.primary
    # The primary of the saves that follow: the last one that differs from that of this save.
    primary = next((each.primary for each in reversed(verdicts) if each.primary != known), known)
    return {
        "reason": next(filter(None, (reason for reason, _ in cautions)), ""),
        "distrusted": sorted({i for _, indices in cautions for i in indices}),
        "replicas": [each.replica for each in verdicts],
        "primary": dataclasses.astuple(primary),
        "memory": _memory(reports, differing=differing),
        "measured": reports[0]["measured"],
        "background": [all(x["background"][0] for x in reports), *reports[0]["background"][1:]],
    }


def _validate_local(step: int, reports: Sequence[Report], structure: Structure) -> None:
    reported = [dict(report["local"]) for report in reports]
    for i in sorted({index for each in reported for index in each}):
        holders = [p for p, each in enumerate(reported) if i in each]
        if len(holders) < len(reported):
            raise MismatchError(
                f"leaf {structure.leaves[i].path}: it lies on devices of process {holders[0]} "
                "alone, where it cannot be told from one that every process has for itself. "
                f"Step {step} is not saved. Place it on devices of all processes "
                "(jax.device_put onto a global sharding), or leave it out of the state."
            )
        other = [p for p, each in enumerate(reported) if each[i] != reported[0][i]]
        if other:
            raise MismatchError(
                f"leaf {structure.leaves[i].path}: it lies on every process by itself, so "
                f"it is expected to be equal on all {len(reports)}; processes "
                f"{', '.join(map(str, other[:10]))} hold other bits than process 0. Step "
                f"{step} is not saved. Make it one global array "
                "(jax.make_array_from_process_local_data), or leave it out of the state."
            )


def _validate_unchanged(
    save: Save, step: Pending, before: Sequence[int], found: Sequence[int]
) -> None:
    if changed := [i for i in step.plan.unchanged if found[i] != before[i]]:
        then = f" Step {save.own.step} is not saved; the next one will be a base."
        raise pending.changed_alone(save.directory, step.step, save.structure, changed, then)


def _validate_healed(save: Save, step: Pending, reports: Sequence[Report]) -> None:
    """Raises where a process found wrong what another one owns, and did not store."""
    leaves = step.plan.structure.leaves
    stored = [frozenset(i for i, _ in report.get("letters", ())) for report in reports]
    found = {i for report in reports for i in report["unhealed"]}
    if wrong := sorted(i for i in found if not all(i in stored[n] for n in leaves[i].owners)):
        raise ReplayError(
            f"{save.directory}: step {step.step}: "
            f"{pending.mismatch(step.plan.structure, wrong)}. A process found this that does "
            "not own what it found, so it could not store it: the step is not saved. "
            f"{pending.CAUSES} {_NEXT}"
        )


def _validate_sampled(step: Pending, reports: Sequence[Report], verdict: Verdict) -> None:
    """Raises where samples that devices took in turns do not tell of the replica that is saved."""
    plan, structure = step.plan, step.plan.structure
    if plan.update.engine != "sample" or structure.primary.is_apart or is_proved(reports):
        return
    updates = plan.decision.updates
    replayed = structure.computed_by(updates) - plan.unreplayed
    if wrong := sorted(verdict.leaves & (replayed | structure.consumed_by(updates))):
        raise ReplicaError(
            f"step {step.step}: expected replicas that are equal, of which each device compares a "
            f"part with the replay; found that those of {pending.few_of(structure, wrong)} "
            "differ. The step is not saved; the next save is a base, and from then on each device "
            "compares all that it holds. check_replicas, in the guide on several processes, says "
            "what to look for."
        )


def _validate_replayed(
    save: Save, step: Pending, reports: Sequence[Report], found: Sequence[int]
) -> bool:
    """Compares the shadows of all processes, which hold the state in parts, with the state.

    True if they differ where that may be the arithmetic of the hosts.
    """
    reported = [report["replayed"] for report in reports]
    if len(reported) == 1 or None in reported:
        return False  # a process alone has compared its own
    sums: dict[int, list[int]] = {}
    for i, each in itertools.chain(*reported):
        sums.setdefault(i, []).append(each)
    wrong = sorted(i for i, each in sums.items() if combine(each) != found[i])
    if wrong and shadow.is_host():
        step.disproved = frozenset(wrong)
        raise ReplayError(
            f"{save.directory}: step {step.step}: "
            f"{pending.mismatch(step.plan.structure, wrong)}. This was found after the save had "
            "returned, when the state could not be had any more: the step is not saved. "
            f"{pending.CAUSES} {_NEXT}"
        )
    return bool(wrong)


def _memory(reports: Sequence[Report], *, differing: bool) -> tuple[bool, str]:
    """True where memory keeps records from now on, and the reason why the next save is a base."""
    kinds = [report["memory"][0] for report in reports]
    if differing:
        return True, shadow.OTHER_BITS
    if {"records", "state"}.issubset(kinds):
        return True, f"the host of process {kinds.index('records')} cannot compute the update"
    return False, next((why for report in reports if (why := report["memory"][1])), "")


def is_proved(reports: Sequence[Report]) -> bool:
    """True if the shadows of all processes were compared with a step's state."""
    is_compared = len(reports) == 1 or shadow.is_host()
    return is_compared and all(report["replayed"] is not None for report in reports)


def by_step(reports: Sequence[Report]) -> list[tuple[Report, ...]]:
    """The reports of all processes on each step."""
    return [*zip(*(report["steps"] for report in reports), strict=True)]


def fingerprints_of(reports: Sequence[Report]) -> tuple[int, ...]:
    """Fingerprints of all leaves, from each process's contribution to them."""
    columns = zip(*(report["fingerprints"] for report in reports), strict=True)
    return tuple(combine(column) for column in columns)
