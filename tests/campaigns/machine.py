"""Saves, harms, kills and restores runs in any order, against a dictionary from step to bits.

    python -m tests.campaigns.machine --profile crashes --count 500
    python -m tests.campaigns.machine --profile hosts --minutes 60 --seed 3
    python -m tests.campaigns.machine --profile all --count 8 --minutes 5
    python -m tests.campaigns.machine --list

``--minutes`` is for each profile; ``all`` names all of them.

A world is one root, drawn from a seed with the options of those who save into it. It has one life
after the other (:mod:`.life`), each of one or more processes, on a mesh of its own: a life restores
every listed step, goes on from the newest one or from memory, trains, records, saves, edits, looks
back and deletes, until it is sent SIGKILL, meets a fault of its storage, or ends. What each process
tells is the dictionary: the digest of each state when it was trained, what was reported as saved,
and what lay in memory. The next life is compared with it:

* lost: reported as saved, or held whole in memory, and not there, or refused.
* wrong: a state with other bits than it was trained with.
* crashed: a process that ended by another signal than ours, or hung.
* other: anything else that is not promised.

``PROFILES`` says what each campaign does to its worlds. Kinds of lives with memory: skew, with
pauses around all that is stored; first, in which the host that is killed has process 0; corrupt,
after which bits are flipped in the file of another host; newer, after which storage has a newer
step than memory; more, in which each host has two processes; base, in which a host dies between two
exchanges of a base; several and all, after which the memory of two or three hosts, or of all, is
lost; bare, before which storage loses all. Mostly the memory of the host that dies first is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns import command, shim
from tests.campaigns.profiles import ANY_ORDER, PROFILES, Profile
from tests.campaigns.world import Server, Tally, World

IN_STORES = {"crashes", "together", "outages", ANY_ORDER}
"""Profiles that can save into an object store."""


def can_mount() -> bool:
    """True if this process may mount a file system."""
    with tempfile.TemporaryDirectory() as place:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", place]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            return False
        subprocess.run(["umount", place], check=True)
    return True


def _lacks(needs: set[str], directory: Path) -> dict[str, str]:
    """What this machine has not of what profiles need, and why; loads the shim if it is needed."""
    lacks = dict[str, str]()
    if "tmpfs" in needs and not can_mount():
        lacks["tmpfs"] = "a tmpfs cannot be mounted here"
    if "shim" in needs:
        library = shim.build(directory)
        if library is None:
            lacks["shim"] = "no C compiler here, or no Linux"
        else:
            os.environ.update(shim.loading(library))  # before the process is made that others fork
    return lacks


def campaign(
    profile: Profile, directory: Path, seed: int, trials: Iterator[int], store: str = ""
) -> Tally:
    """Lives of worlds, one after another.

    Args:
        profile: one of :data:`PROFILES`.
        directory: directory to work in; must exist.
        seed: seed of the first world.
        trials: as many as lives are to be.
        store: its scheme; empty for the disk.
    """
    tally, world, rng = Tally(), None, random.Random(seed)
    with contextlib.ExitStack() as stack:
        server = Server(store) if store else None
        if server is not None:
            stack.callback(server.close)
        for number in trials:
            is_first = number % profile.lives == 0
            if is_first:
                if world is not None:
                    world.close()
                place = directory / f"world-{seed + number}"
                place.mkdir()
                url = f"{server.url}/world-{seed + number}" if server else ""
                away = server if "hangs" in profile.faults else None
                parts = (profile, place, directory / "compiled", seed + number, tally)
                world = World(*parts, url=url, server=away)
            assert world is not None
            drawn = rng.choices([*profile.kinds], [*profile.kinds.values()])[0]
            kind = next(iter(profile.kinds)) if is_first else drawn
            if kind == "phase":
                world.die_in_a_save()
            else:
                world.live(kind)
        if world is not None:
            world.close()
    return tally


def any_order(count: int, seed: int, store: str) -> Tally:
    """Random examples of the state machines of tests/faults/test_retention_machine.py."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from tests import object_stores
    from tests.faults import test_retention_machine as machines

    tally, kinds = Tally(), [machines.Retention, machines.RetentionOfReferences]
    settings = hypothesis.settings(
        machines.sizes(count),
        database=None,
        # To shrink what fails takes longer than to find it.
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    with contextlib.ExitStack() as stack:
        if store:
            kinds = [machines.RetentionInStore]
            served = stack.enter_context(object_stores.served(store))
            machines.RetentionInStore.url = served
        for kind in kinds:

            class Counted(kind):
                def __init__(self) -> None:
                    tally.tried += 1
                    super().__init__()

            try:
                run_state_machine_as_test(hypothesis.seed(seed)(Counted), settings=settings)
            except Exception:
                tally.other.append(traceback.format_exc())
    return tally


def found_by(
    named: Sequence[tuple[str, int]], directory: Path, seed: int, minutes: float, store: str
) -> Iterator[dict[str, Any]]:
    """What each of some profiles finds.

    Args:
        named: names of profiles, and numbers of trials.
        directory: directory to work in.
        seed: seed of all choices.
        minutes: minutes after which no trial of a profile begins.
        store: its scheme; empty for the disk.
    """
    needs = {PROFILES[name].needs for name, _ in named if name in PROFILES}
    lacks = _lacks(needs, directory)
    for name, count in named:
        about = {"profile": name, "seed": seed}
        if name == ANY_ORDER:
            yield about | vars(any_order(count, seed, store))
        elif why := lacks.get(PROFILES[name].needs):
            yield about | {"not_tried": why}
        else:
            (directory / name).mkdir()
            trials = command.trials(count, minutes)
            yield about | vars(campaign(PROFILES[name], directory / name, seed, trials, store))


def main() -> int:
    """Reads the command line, and prints what was found."""
    options: dict[str, Any] = {"seed": 0, "minutes": math.inf, "directory": None, "json": False}
    parser = command.parser(__doc__, count=100, store=None, **options)
    parser.add_argument("--profile", nargs="+", default=["crashes"], metavar="NAME[=COUNT]")
    parser.add_argument("--list", action="store_true", help="print the profiles")
    args = parser.parse_args()
    if args.list:
        rows = [*((name, each.does) for name, each in PROFILES.items())]
        rows.append((ANY_ORDER, "saves, deletions, moves, crashes, restores in any order"))
        print(command.table(("profile", "does"), rows))
        return 0
    given = [*PROFILES, ANY_ORDER] if args.profile == ["all"] else args.profile
    parts = [each.partition("=") for each in given]
    named = [(name, int(count or args.count)) for name, _, count in parts]
    if unknown := {name for name, _ in named} - {*PROFILES, ANY_ORDER}:
        parser.error(f"expected names of --list, found {sorted(unknown)}")
    if args.store and (others := {name for name, _ in named} - IN_STORES):
        parser.error(f"expected profiles in object stores ({sorted(IN_STORES)}), found {others}")
    in_memory = any(name in PROFILES and PROFILES[name].memory for name, _ in named)
    shm = "/dev/shm" if in_memory and Path("/dev/shm").is_dir() else None
    directory = args.directory or Path(tempfile.mkdtemp(prefix="machine-", dir=shm))
    problems = list[str]()
    with command.workplace(directory, problems):
        found = [*found_by(named, directory, args.seed, args.minutes, args.store or "")]
        names = ("lost", "wrong", "crashed", "other")
        problems += [x for each in found for name in names for x in each.get(name, ())]
    rows = list[tuple[object, ...]]()
    for each in found:
        told = {**each, **each.get("counts", {})} | {x: len(each.get(x, ())) for x in names}
        shown = ("profile", "tried", *names, *each.get("counts", {}))
        rows += [(name, told[name]) for name in shown if name in told]
    text = "" if args.json else command.table(("what", "number"), rows)
    return command.finish(found[0] if len(found) == 1 else {"profiles": found}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
