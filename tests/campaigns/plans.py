"""Plans of training runs, drawn at random: everything that a run does, and when.

There are three families: ``training``, which is perturbed in every way that people perturb a run;
``matrix``, of all optimizers, models, meshes and data types (``summing``: of optimizers that add up
elements); and ``exactness``, a table of optimizers on one mesh.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

MODELS = ("mlp", "wide", "head", "lora", "transformer", "moe")
OPTIMIZERS = (
    *("adamw", "adamw", "adamw", "lion", "momentum", "scheduled", "injected", "schedule_free"),
    *("multisteps", "partly_frozen", "half_moment", "rmsprop", "if_finite", "adabelief"),
)
LAYOUTS = {1: ("one",), 8: ("data", "data", "sharded", "sharded_42", "sharded_42", "data_42")}
KINDS = (
    "plain",
    "last batch",
    "zero layer",
    "l2",
    "thawed",
    "schedule from zero",
    "edited bias",
    "edited leaf",
    "edited element",
    "edited row",
    "edited moment",
    "diverged",
    "rolled back",
    "rolled back, counter on",
    "trained unsaved",
    "swapped params",
    "reset optimizer",
    "projected",
    "skipped step",
    "skipped params",
    "after the recorder",
    "rate before",
    "rate after",
    "rate always",
    "resumed",
    "resumed elsewhere",
    "reopened",
    "two handlers",
    "looked back",
    "went back",
    "recorded",
    "interval",
    "eager",
    "two programs",
    "separate",
    "accumulated outside",
    "averaged copy",
    "pmean",
    "tiny gradients",
    "not ready",
)
"""What may be done to a run; each run has one of them for certain, and others by chance."""
_EVENTS = {
    *("edited bias", "edited leaf", "edited element", "edited row", "edited moment"),
    *("diverged", "rolled back"),
    *("rolled back, counter on", "trained unsaved", "swapped params", "reset optimizer"),
    *("rate before", "rate after", "resumed", "resumed elsewhere", "reopened"),
    *("looked back", "went back"),
}
_FUSED = {"projected", "skipped step", "skipped params", "thawed", "averaged copy", "pmean"}
_RATES = {"rate before", "rate after", "rate always"}
_NOT_LAST = {"after the recorder", "accumulated outside"}


@dataclass(frozen=True)
class Event:
    """Something that is done to the state once.

    Attributes:
        step: in which step of the loop.
        after: after its update and before its save; else before the update.
        kind: one of :data:`KINDS`.
        depth: how many steps it goes back, where it does.
    """

    step: int
    after: bool
    kind: str
    depth: int


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: what it was drawn from; with its family it tells the run.
        kinds: what is done to it, the first for certain.
        devices: of the process.
        model, optimizer, layout, param_dtype, record_dtype: of the training, by name.
        steps: of the loop.
        program: ``fused``, ``mapped`` (over data-parallel devices, with pmean), ``eager``, ``two``
            (gradients, update) or ``separate``.
        clips: whether gradients are clipped before the recorder.
        l2: whether the loss has a term of all params.
        tiny: whether gradients are so small that their squares are denormal.
        scaled: whether the loss is scaled up, and the gradients down.
        epoch: every so many steps the batch has one example; 0 for never.
        frozen_until: the step until which the first layers get no gradient.
        behind: a transformation after the recorder.
        projects: whether params are projected every fifth step.
        skips: what is left as it was when a loss is not finite: ``state`` or ``params``.
        accumulates: whether MultiSteps is around the recorder.
        averages: whether the state holds a moving average of the params.
        integers: whether the params have a leaf of integers.
        lookahead: whether the recorder is inside optax.lookahead.
        events: what is done once.
        records: whether steps are recorded where they can be.
        ready: whether the values are waited for before a save.
        max_to_keep, interval, max_deltas, delta: of manager and handler.
        turn: steps after which the other handler saves; 0 for one handler.
        elsewhere: meshes on which the steps are restored too; a star is any other.
        knows: whether who restores knows the recorder.
        check: of the handlers: ``auto``, ``sample`` or ``full``.
    """

    seed: int
    kinds: tuple[str, ...]
    devices: int
    model: str
    optimizer: str
    layout: str
    param_dtype: str = "float32"
    record_dtype: str | None = None
    steps: int = 4
    program: str = "fused"
    clips: bool = False
    l2: bool = False
    tiny: bool = False
    scaled: bool = False
    epoch: int = 0
    frozen_until: int = 0
    behind: str = ""
    projects: bool = False
    skips: str = ""
    accumulates: bool = False
    averages: bool = False
    integers: bool = False
    lookahead: bool = False
    events: tuple[Event, ...] = ()
    records: bool = False
    ready: bool = True
    max_to_keep: int | None = None
    interval: int = 1
    max_deltas: int = 20
    delta: str = "auto"
    turn: int = 0
    elsewhere: tuple[str, ...] = ()
    knows: bool = False
    check: str = "auto"

    @property
    def text(self) -> str:
        """The run in one line."""
        events = [f"{e.kind}@{e.step}{'+' if e.after else '-'}" for e in self.events]
        names = ("model", "optimizer", "layout", "program", "param_dtype", "record_dtype")
        parts = [str(getattr(self, name)) for name in names]
        flags = [n for n in ("l2", "scaled", "integers", "lookahead", "clips") if getattr(self, n)]
        told = (" ".join([*parts, *flags]), ", ".join(self.kinds), " ".join(events))
        return " | ".join(each for each in told if each)


def devices_of(seed: int) -> int:
    """The devices of a run, where nobody chooses them."""
    return (1, 8)[random.Random(f"devices {seed}").randrange(2)]


def draw(seed: int, devices: int | None = None) -> Plan:
    """Draws a run that is perturbed."""
    rng = random.Random(f"run {seed}")
    first = KINDS[seed % len(KINDS)]
    more = (0, 0, 0, 1, 1, 2)[rng.randrange(6)]
    kinds = tuple(dict.fromkeys((first, *rng.sample(KINDS, more))))
    count = devices or devices_of(seed)
    steps = rng.randint(11, 14)
    events = [
        Event(rng.randint(4, steps - 2), _is_after(rng, kind), kind, rng.randint(1, 3))
        for kind in kinds
        for _ in range(rng.randint(1, 2))
        if kind in _EVENTS
    ]
    if "rate always" in kinds:
        after = rng.random() < 0.5
        events += [Event(step, after, "rate always", 0) for step in range(2, steps)]
    param_dtype = rng.choice(("float32", "float32", "float32", "bfloat16"))
    program = _program(kinds, count)
    return Plan(
        seed=seed,
        kinds=kinds,
        devices=count,
        model=_model(rng, kinds),
        optimizer=_optimizer(rng, kinds, program),
        layout="data" if program == "mapped" else rng.choice(LAYOUTS[count]),
        param_dtype=param_dtype,
        record_dtype=rng.choice((None, "bfloat16")) if param_dtype == "float32" else None,
        steps=steps,
        program=program,
        clips=rng.random() < 0.5 and "tiny gradients" not in kinds,
        l2="l2" in kinds,
        tiny="tiny gradients" in kinds,
        epoch=rng.randint(3, 5) if "last batch" in kinds else 0,
        frozen_until=rng.randint(2, 6) if "thawed" in kinds else 0,
        behind=rng.choice(("scale", "decay")) if "after the recorder" in kinds else "",
        projects="projected" in kinds,
        skips="state" if "skipped step" in kinds else "params" * ("skipped params" in kinds),
        accumulates="accumulated outside" in kinds,
        averages="averaged copy" in kinds,
        events=tuple(sorted(events, key=lambda event: (event.step, event.after))),
        records="recorded" in kinds or rng.random() < 0.25,
        ready=not ("not ready" in kinds or rng.random() < 0.35),
        max_to_keep=rng.choice((None, None, None, 3)),
        interval=rng.randint(2, 3) if "interval" in kinds else 1,
        max_deltas=rng.choice((20, 20, 20, 5)),
        delta=rng.choice(("auto",) * 9 + ("bits",)),
        turn=rng.randint(1, 4) if "two handlers" in kinds else 0,
        elsewhere=("*",) if rng.random() < 1 / 3 and count > 1 else (),
        knows=rng.random() < 0.5,
    )


def _is_after(rng: random.Random, kind: str) -> bool:
    known = {"rate before": False, "rate after": True}
    return known.get(kind, rng.random() < 0.5)


def _program(kinds: tuple[str, ...], devices: int) -> str:
    if "pmean" in kinds and devices > 1:
        return "mapped"
    if _FUSED.intersection(kinds):
        return "fused"
    if "separate" in kinds and not _NOT_LAST.intersection(kinds):  # it would be refused
        return "separate"
    return "eager" if "eager" in kinds else "two" if "two programs" in kinds else "fused"


def _model(rng: random.Random, kinds: tuple[str, ...]) -> str:
    if {"edited element", "edited row"}.intersection(kinds):
        return rng.choice(("wide", "transformer", "moe"))
    if "zero layer" in kinds:
        return rng.choice(("head", "lora"))
    return rng.choice(MODELS)


def _optimizer(rng: random.Random, kinds: tuple[str, ...], program: str) -> str:
    if _RATES.intersection(kinds):
        return "injected"
    if "schedule from zero" in kinds:
        return "scheduled"
    if program == "separate":
        return rng.choice(("adafactor", "lamb", "clipped", "adamw", "injected"))
    return rng.choice(OPTIMIZERS)


_MESHES = ("data", "sharded", "sharded_42", "sharded_24", "sharded_22")


def draw_row(seed: int, *, summing: bool = False) -> Plan:
    """Draws a run among all optimizers, or among those that add up elements."""
    from tests.campaigns import optimizers  # it imports jax
    from tests.campaigns.flax_models import ALL

    rng = random.Random(f"row {seed}")
    names = [list(optimizers.found()), list(optimizers.COMPOSED)]
    if summing:
        names = [list(optimizers.SUMMING)]
    layout = rng.choice(("one", "data", "sharded", "sharded_42", "data_42", "explicit_42"))
    records = (None, None, None, "bfloat16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
    is_mapped = layout == "data" and rng.random() < 0.4
    other = rng.choice([each for each in _MESHES if each != layout])
    return Plan(
        seed=seed,
        kinds=("summing" if summing else "matrix",),
        devices=8,
        optimizer=rng.choice(rng.choice(names)),
        model=rng.choice(list(ALL)),
        layout=layout,
        param_dtype=rng.choice(("float32",) * 4 + ("bfloat16", "float16")),
        record_dtype=rng.choice(records),
        program="mapped" if is_mapped else "fused",
        l2=rng.random() < 0.3,
        scaled=rng.random() < 0.2,
        epoch=int(rng.random() < 0.2),
        clips=rng.random() < 0.3 and not layout.startswith("explicit"),  # a dot product
        integers=rng.random() < 0.08,
        lookahead=rng.random() < 0.04,
        elsewhere=tuple(dict.fromkeys(x for x in ("one", other) if x != layout)),
        check="full",
    )


def table() -> list[Plan]:
    """Optimizers on one mesh, by their names; their updates run apart where sums are many."""
    plan = Plan(0, (), 8, "transformer", "", "sharded_42", steps=10, clips=True)
    plan = replace(plan, elsewhere=("sharded", "sharded_24"), check="full")
    summing = ("adafactor", "contrib.muon", "lamb")
    bare = ("clipped", "clipped, half moment", "clipped lion")
    alone = [
        *("adamw", "lion", "momentum", "schedule_free", "half_moment", "adabelief", "rmsprop"),
        *summing,
    ]
    found = [replace(plan, optimizer=name) for name in alone]
    found += [replace(plan, optimizer=name, clips=False) for name in (*bare, "clipped, multisteps")]
    found += [replace(plan, optimizer="adamw", record_dtype="bfloat16")]
    steered = tuple(Event(step, False, "rate always", 0) for step in range(6, 10))
    found += [replace(plan, optimizer="injected", events=steered)]
    found += [replace(plan, optimizer=name, program="separate") for name in summing]
    found += [replace(plan, optimizer=x, program="separate", clips=False) for x in bare]
    names = [f"{each.optimizer}, {each.record_dtype or each.program}" for each in found]
    return [
        replace(each, seed=n, kinds=(name,))
        for n, (each, name) in enumerate(zip(found, names, strict=True))
    ]


def plan_of(family: str, seed: int, devices: int | None = None) -> Plan:
    """The run of a seed in one of :data:`FAMILIES`."""
    if family == "training":
        return draw(seed, devices)
    if family == "exactness":
        rows = table()
        return rows[seed % len(rows)]
    return draw_row(seed, summing=family == "summing")


FAMILIES = ("training", "matrix", "summing", "exactness")
