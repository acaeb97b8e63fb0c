"""Eight virtual CPU devices and a cache of compiled programs, set before anything imports jax.

Most of a test's time is compiling, and most tests compile what another one compiled before: the
cache is shared by all worker processes and kept between runs. Hypothesis profiles, and the choice
of the tests that run by default, stand here too.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".pytest_cache" / "user")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # what is forked has one thread

import pytest
from hypothesis import settings

from adacheck_jax.schemes import SCHEMES
from benchmarks import xla_flags
from tests import slices
from tests.last_words import LastWords

if TYPE_CHECKING:
    from tests.object_stores import Store

# Tensorstore reads addresses once, as a process first opens a bucket, which any test may do.
_LISTENERS = {name: socket.socket() for name in SCHEMES}
for _name, _listener in _LISTENERS.items():
    _listener.bind(("127.0.0.1", 0))
    os.environ[SCHEMES[_name].endpoint] = f"http://127.0.0.1:{_listener.getsockname()[1]}"
_STORES = list["Store"]()

settings.register_profile("default", max_examples=10, deadline=None)
settings.register_profile("ci", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


COMPILED_FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""Flags by which XLA compiles in a fraction of the time, to programs that are slower.

A release of XLA that does not know one goes without it (jaxlib 0.12: the emitters of fusions are
always used). Programs of pinned updates compute the same bits. Users compile without these flags;
so do campaigns, and whoever sets an optimization level, as ``.ci/run`` does for tests of what pins
an update.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of a slice of the tests."""
    parser.addoption("--slice", metavar="K/N", help="run slice K modulo N of N slices of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Adds these flags where campaigns are left out, before anything uses JAX."""
    if given := config.getoption("--slice"):
        config.pluginmanager.register(slices.Slice(given))
    if not hasattr(config, "workerinput"):  # in the process that starts the workers
        config.pluginmanager.register(LastWords())
    flags = os.environ["XLA_FLAGS"]  # of the caller, or of a process that has added them
    if "not campaign" in config.option.markexpr and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = " ".join([flags, *xla_flags.known(COMPILED_FAST)])


LONGEST = ("test_docs_code.py", "test_examples.py")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as campaigns what ``covering`` and ``first`` leave out, or as slow as they say.

    What is spare is slow too, but where it is measured. Files whose tests take longest come first,
    so that none of them is left to the end.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    by_test: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        is_campaign = item.get_closest_marker("campaign") is not None
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not is_campaign:
            by_test.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in by_test.values():
        if marker := cases[0].get_closest_marker("covering"):
            kept = _covering(cases, *marker.args)
            quick = kept[: marker.kwargs.get("quick")]
        elif marker := cases[0].get_closest_marker("first"):
            quick, kept = cases[: marker.args[0]], cases[: marker.kwargs.get("slow", 0)]
        else:
            continue
        for case in cases:
            if case not in quick:
                case.add_marker("slow" if case in kept else "campaign")
    if slices.MEASURED not in os.environ:
        spare = {*slices.SPARE.read_text().splitlines()}
        for item in items:
            if item.nodeid in spare:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Keeps what was imported out of every garbage collection, and collects seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)


def _covering(cases: list[pytest.Function], strength: int) -> list[pytest.Function]:
    """Few of a test's cases, in which all combinations of so many parameters' values are found."""
    wanted = [_combinations(enumerate(case.callspec._idlist), strength) for case in cases]
    missing, kept = set().union(*wanted), []
    while missing:
        found = [len(missing & each) for each in wanted]
        best = found.index(max(found))
        missing -= wanted[best]
        kept.append(cases[best])
    return kept


def _combinations(values: Iterable[tuple[int, str]], size: int) -> set[tuple[object, ...]]:
    """All combinations of so many parameters, or of all, each with the name of its value."""
    named = [*values]
    return set(itertools.combinations(named, min(size, len(named))))


def pytest_runtest_setup() -> None:
    """Names the stores again: a test in which one was started may put the environment back."""
    for store in _STORES:
        os.environ.update(store.environment)


def _store_of(name: str) -> Any:
    """A fixture: an object store on this machine, for all tests of a process."""

    @pytest.fixture(scope="session", name=name)
    def fixture() -> Iterator[Store]:
        from tests import object_stores  # which not every environment can start

        with object_stores.SERVERS[name](_LISTENERS[name]) as store:
            os.environ.update(store.environment)
            _STORES.append(store)
            yield store

    return fixture


globals().update({f"store_{name}": _store_of(name) for name in SCHEMES})
