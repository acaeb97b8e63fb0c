"""Trains, saves, records, restores and exports inside contexts of jax, alone and in pairs.

    python -m tests.campaigns.contexts
    python -m tests.campaigns.contexts --alone

One run of four steps is shared. Inside the contexts its third step is trained anew by a compiled
train step, and the fourth by one that is not compiled; all four are saved, the third by
``record_step``; each is restored, and the third is exported. What is trained is compared with what
a compiled step computes without the contexts, and what is restored and exported with what was
saved, bit by bit.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

import adacheck_jax as adacheck
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools.handover.export import export
from adacheck_jax.tools.handover.formats import Format
from tests.campaigns import command
from tests.support import abstract, host_copy, manager_of

CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "enable_checks": lambda: jax.enable_checks(True),
    "no_tracing": lambda: jax.no_tracing(True),
    "log_compiles": lambda: jax.log_compiles(True),
    "explain_cache_misses": lambda: jax.explain_cache_misses(True),
    "enable_x64(True)": lambda: jax.enable_x64(True),
    "enable_x64(False)": lambda: jax.enable_x64(False),
    "transfer_guard(log)": lambda: jax.transfer_guard("log"),
    "transfer_guard(disallow)": lambda: jax.transfer_guard("disallow"),
    "transfer_guard(log_explicit)": lambda: jax.transfer_guard("log_explicit"),
    "transfer_guard(disallow_explicit)": lambda: jax.transfer_guard("disallow_explicit"),
    "host_to_device(disallow_explicit)": lambda: jax.transfer_guard_host_to_device(
        "disallow_explicit"
    ),
    "device_to_host(disallow_explicit)": lambda: jax.transfer_guard_device_to_host(
        "disallow_explicit"
    ),
    "device_to_device(disallow_explicit)": lambda: jax.transfer_guard_device_to_device(
        "disallow_explicit"
    ),
    "numpy_rank_promotion(raise)": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion(strict)": lambda: jax.numpy_dtype_promotion("strict"),
    "default_matmul_precision(bfloat16)": lambda: jax.default_matmul_precision("bfloat16"),
    "default_prng_impl(rbg)": lambda: jax.default_prng_impl("rbg"),
    "threefry_partitionable(False)": lambda: jax.threefry_partitionable(False),
    "default_device(1)": lambda: jax.default_device(jax.devices()[1]),
}
ACTIONS = ("compiled step", "plain step", "save", "record_step", "restore", "export")
OK = "ok"
OTHER_ARITHMETIC = "enable_x64(True)"
"""The context in which adamw itself computes other bits."""

_HALVES = [*CONTEXTS][: len(CONTEXTS) // 2], [*CONTEXTS][len(CONTEXTS) // 2 :]
COVERING = [*zip(*_HALVES, strict=True)]
"""Few pairs, with every context in one of them."""
PAIRS = [*COVERING, *(x for x in itertools.combinations(CONTEXTS, 2) if x not in COVERING)]


class Run:
    """Four steps of one run, each trained once in a process, and a train step."""

    def __init__(self) -> None:
        self.recorder = adacheck.Recorder(optax.adamw(1e-2))
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.standard_normal((8, 16), np.float32)), "b": jnp.zeros(16)}
        self.grads = [
            jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape, np.float32)), params)
            for _ in range(4)
        ]
        rest = {
            "key": jax.random.key(0),
            "on_host": np.array([np.nan, np.inf]),
            "number": 3,
            "beyond": jnp.arange(3.0) * np.inf,  # NaN among infinities
        }
        state = {"params": params, "opt_state": self.recorder.init(params), "rest": rest}
        self.plain = functools.partial(_step, self.recorder)
        self.compiled = jax.jit(self.plain)
        self.states = [state]
        for grads in self.grads:
            self.states.append(_advanced(self.compiled, self.states[-1], grads))
            _advanced(self.plain, self.states[-2], grads)  # traced before no_tracing


def _step(recorder: adacheck.Recorder, trained: Any, grads: Any) -> Any:
    updates, opt_state = recorder.update(grads, trained["opt_state"], trained["params"])
    return {"params": optax.apply_updates(trained["params"], updates), "opt_state": opt_state}


def _advanced(step: Callable[..., Any], state: Any, grads: Any) -> Any:
    """The next state, by one way to run a train step."""
    trained = step({name: state[name] for name in ("params", "opt_state")}, grads)
    return {**trained, "rest": state["rest"]}


@functools.cache
def _saved() -> Run:
    """The run whose steps are saved."""
    return Run()


@functools.cache
def _trained() -> Run:
    """The run whose steps are trained anew: a recorder remembers how it was traced last."""
    return Run()


@functools.cache
def _wide() -> list[Any]:
    """The third and the fourth step, if adamw's scalars may have 64 bits."""
    run, recorder = _trained(), adacheck.Recorder(optax.adamw(1e-2))
    compiled = jax.jit(functools.partial(_step, recorder))
    with jax.enable_x64(True):
        return [_advanced(compiled, run.states[i], run.grads[i]) for i in (2, 3)]


def _inside(names: Sequence[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context(CONTEXTS[name]())
    return stack


class Trial:
    """One run inside some contexts.

    Attributes:
        outcomes: for each action :data:`OK`, or what was raised or is wrong.
    """

    def __init__(self, names: Sequence[str], root: Path) -> None:
        self._names, self._root = names, root
        self.outcomes: dict[str, str] = dict.fromkeys(ACTIONS, OK)

    def _do(self, action: str, work: Callable[[], Any]) -> Any:
        try:
            with _inside(self._names):
                return work()
        except Exception as error:
            self.outcomes[action] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
            return None

    def _expect(self, action: str, found: Any, expected: Any, why: str) -> None:
        copies = [host_copy(each) for each in (found, expected)]
        bits = [[(x.dtype, x.shape, x.tobytes()) for x in each] for each in copies]
        if bits[0] != bits[1]:
            self.outcomes[action] = why

    def train(self) -> None:
        """The third and the fourth step."""
        run, widths = _trained(), [x for x in self._names if x.startswith("enable_x64")]
        is_wide = widths[-1:] == [OTHER_ARITHMETIC]  # the innermost decides
        ways = (("compiled step", run.compiled, 3), ("plain step", run.plain, 4))
        for action, step, number in ways:
            before, grads = run.states[number - 1], run.grads[number - 1]
            state = self._do(action, functools.partial(_advanced, step, before, grads))
            if state is not None:
                expected = _wide()[number - 3] if is_wide else run.states[number]
                self._expect(action, state, expected, "other bits than compiled")

    def keep(self) -> None:
        """Save, record, restore and export."""
        states, handler = _saved().states, adacheck.AdaCheckHandler(_saved().recorder)
        saved = [host_copy(state) for state in states]
        with manager_of(self._root / "run", handler) as manager:

            def save(step: int) -> None:
                manager.save(step, args=adacheck.SaveArgs(states[step]))
                manager.wait_until_finished()

            for step in (1, 2, 4):
                if step == 4:
                    is_recorded = self._do("record_step", lambda: handler.record_step(states[3]))
                    self._expect("record_step", is_recorded, True, "not recorded")
                self._do("save", functools.partial(save, step))
            wanted = jax.tree.map(_wanted, states[4])
            for step in (4, 2, 3, 1):
                args = adacheck.RestoreArgs(wanted, step=3 if step == 3 else None)
                at = 4 if step == 3 else step
                state = self._do("restore", lambda at=at, args=args: manager.restore(at, args=args))
                if state is not None:
                    self._expect("restore", state, saved[step], "other bits than saved")
                if handler.restored is not None and handler.restored.replayed_count != step - 1:
                    self.outcomes["save"] = f"{handler.restored.replayed_count} replayed of {step}"
        self._export(states[3]["params"])

    def _export(self, params: Any) -> None:
        root, target = located(str(self._root / "run")), str(self._root / "exported")
        work = functools.partial(export, root, 3, target, Format.SAFETENSORS)
        if self._do("export", work) is None:
            return
        found = sorted(x.tobytes() for x in load_file(f"{target}/model.safetensors").values())
        expected = sorted(x.tobytes() for x in host_copy(params))
        if found != expected:
            self.outcomes["export"] = "other bits than saved"


def _wanted(leaf: Any) -> Any:
    return abstract(leaf) if isinstance(leaf, jax.Array) else leaf


def trial(names: Sequence[str], root: Path) -> dict[str, str]:
    """The outcome of each action inside some contexts.

    Args:
        names: contexts, of :data:`CONTEXTS`, the outermost first.
        root: an empty directory.
    """
    found = Trial(names, root)
    found.train()
    found.keep()
    return found.outcomes


def unexpected(names: Sequence[str], outcomes: Mapping[str, str]) -> dict[str, str]:
    """The outcomes that are neither right nor jax's or optax's own refusal of a train step."""
    refused = {
        "numpy_dtype_promotion(strict)": "TypePromotionError",  # optax.adamw mixes data types
        "no_tracing": "RuntimeError: re-tracing",  # for settings that it was not traced with
    }
    own = tuple(refused[name] for name in names if name in refused)
    return {
        action: outcome
        for action, outcome in outcomes.items()
        if outcome != OK and not (action.endswith("step") and own and outcome.startswith(own))
    }


def main() -> int:
    """Prints a table of all contexts alone, and of the pairs that have an unexpected outcome."""
    parser = command.parser(__doc__)
    parser.add_argument("--alone", action="store_true", help="leave out the pairs")
    arguments = parser.parse_args()
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    every = [(name,) for name in CONTEXTS] + ([] if arguments.alone else PAIRS)
    found, bad = {}, 0
    print("| context | " + " | ".join(ACTIONS) + " |\n|" + "---|" * (len(ACTIONS) + 1))
    for names in every:
        with tempfile.TemporaryDirectory() as root:
            outcomes = found[names] = trial(names, Path(root))
        wrong = unexpected(names, outcomes)
        bad += bool(wrong)
        if len(names) == 1 or wrong:
            print(f"| {', '.join(names)} | {' | '.join(outcomes.values())} |", flush=True)
    counts = collections.Counter(
        (action, outcome.split(":")[0])
        for names, outcomes in found.items()
        for action, outcome in outcomes.items()
    )
    print(f"\n{len(every)} trials, {bad} with an outcome that is not expected")
    for (action, outcome), count in sorted(counts.items()):
        print(f"    {action}: {outcome}: {count}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
