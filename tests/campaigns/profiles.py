"""What each campaign of the machine does to its worlds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOST_KINDS = {
    **{"plain": 1, "skew": 3, "first": 1, "corrupt": 1, "newer": 1, "more": 1, "base": 1},
    **{"several": 1, "all": 0.5, "bare": 0.5},
}
_DELTAS: dict[str, Any] = {"handler": {"max_deltas": 3}}


@dataclass(frozen=True)
class Profile:
    """What is done to the worlds of a campaign.

    Attributes:
        does: what it does, for a table.
        promise: what must come of it.
        lives: lives of a world, before another one begins.
        processes: numbers of processes of a life, one of which is drawn; with memory of hosts.
        devices: devices of all processes together.
        kinds: kinds of lives, and how often each is drawn; the first one is a world's first.
        worlds: options of lives, one of which is drawn for a world.
        life: options of all lives.
        memory: True if hosts have memory, which outlives them.
        faults: faults of storage, one of which each life has.
        commands: commands that run beside a life.
        damages: files that are damaged after each life.
        repairs: how often a root is repaired after a life.
        needs: ``shim``, ``tmpfs`` or nothing.
    """

    does: str
    promise: str = "every committed step is there, exact; training goes on"
    lives: int = 12
    processes: tuple[int, ...] = (1,)
    devices: int = 8
    kinds: Mapping[str, float] = field(default_factory=lambda: {"plain": 1})
    worlds: tuple[Mapping[str, Any], ...] = ({},)
    life: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = False
    faults: tuple[str, ...] = ()
    commands: int = 0
    damages: int = 0
    repairs: float = 0.0
    needs: str = ""


ANY_ORDER = "any-order"
_TRAINS: dict[str, Any] = {
    **{"kept": 3, "waited": 0.4, "edited": 0.1, "looked": 0.08, "deleted": 0.04, "both_axes": True}
}
_WORLDS: tuple[Mapping[str, Any], ...] = (
    {**_DELTAS, "stock": True},
    _DELTAS,
    {"handler": {"max_deltas": 3, "delta": "bits"}, "stock": True},
    {"handler": {"max_deltas": 15}, "recorded": 0.6, "stock": True, "deleted": 0.0},
    {"handler": {"max_deltas": 15}, "recorded": 0.6, "deleted": 0.0},
    {"background": True, "kept": 6},
    {"handler": {"max_deltas": 1}, "stock": True},
)
_ONE_ERROR = "one error, or saved; other steps exact; the next save that Orbax begins works"
PROFILES = {
    "crashes": Profile(
        "SIGKILL at a random moment, and restores on other meshes",
        worlds=_WORLDS,
        life=_TRAINS,
        repairs=0.2,
    ),
    "together": Profile(
        "SIGKILL of one or all of two processes that save together; one to four restore",
        processes=(2, 2, 4, 1),
        worlds=_WORLDS[:2] + _WORLDS[5:],
        life=_TRAINS,
        repairs=0.2,
    ),
    "shadow": Profile(
        "SIGKILL at a random moment, and recovery from memory",
        "the state that the file held, exact; or refused",
        devices=1,
        kinds={"plain": 5, "early": 1},
        worlds=({}, {"records": True, "bytes": 5 << 20}),
        life={
            **{"kept": 3, "handler": {"max_deltas": 12}, "recorded": 0.8, "waited": 0.3},
            **{"chunk_elements": 1 << 12, "chunk_s": 2e-4},
        },
        memory=True,
    ),
    "hosts": Profile(
        "SIGKILL of four hosts at a random moment, one memory wiped, and recovery",
        "the newest step that memory held whole, exact; or refused",
        lives=6,
        processes=(4,),
        devices=4,
        kinds=HOST_KINDS,
        worlds=({}, {"records": True}),
        life={"recorded": 0.6, "waited": 0.3, "chunk_s": 0.001},
        memory=True,
    ),
    "operations": Profile(
        "an operation on the disk fails, or it and all that follow, or the process ends at it",
        _ONE_ERROR,
        worlds=({**_DELTAS, "stock": True}, {"background": True, "stock": True, "kept": 6}),
        life={"kept": 3, "barrier_s": 5, "steps": 7, "both_axes": True},
        faults=("once", "full", "exit", "log"),
        needs="shim",
    ),
    "disk": Profile(
        "a disk without bytes or inodes, or read-only, during a save",
        _ONE_ERROR,
        worlds=({**_DELTAS, "stock": True}, {"handler": {"max_deltas": 0}, "stock": True}),
        life={"kept": 3, "barrier_s": 5, "steps": 5},
        faults=("bytes", "bytes", "inodes", "read-only"),
        needs="tmpfs",
    ),
    "outages": Profile(
        "storage hangs or refuses for seconds while training goes on",
        "every step for which save returned True is there, exact; no error",
        lives=3,
        processes=(1, 1, 2),
        worlds=({}, {"handler": {"max_deltas": 8}}),
        life={"kept": None, "goes_on": True, "pace_s": 0.1, "span": 10**6},
        faults=("hangs", "refuses"),
        needs="shim",
    ),
    "damage": Profile(
        "a file damaged at random",
        "refused by name, or harmless",
        lives=2,
        devices=4,
        kinds={"ends": 1},
        worlds=_WORLDS,
        life={**_TRAINS, "steps": 9, "kept": 4, "looked": 0.0},
        damages=20,
    ),
    "phases": Profile(
        "one of several processes is killed in a phase of a save",
        "the others learn of it; the step before is exact on one, two and four processes",
        processes=(1, 2, 4),
        devices=4,
        kinds={"phase": 1, "ends": 0.3},
        worlds=({},),
        life={"steps": 2, "waited": 1.0, "kept": 3},
    ),
    "beside": Profile(
        "a step deleted while a command reads it",
        "the command tells it, and does the rest; nothing is called damaged",
        lives=3,
        devices=1,
        worlds=({"handler": {"max_deltas": 6}},),
        life={"kept": 2, "pace_s": 0.15},
        commands=15,
    ),
}
