"""Reports of a run that goes on, one whenever its steps have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.report.facts import Report
from adacheck_jax.tools.report.gather import gather
from adacheck_jax.tools.report.norms import Norms
from adacheck_jax.tools.steps import InputError, existing

_SHARE = 4
"""A look is followed by a pause of at least so many times its own length."""


def reports(
    root: AnyPath,
    version: str,
    item: str | None,
    norm_count: int | None,
    every_s: float,
    tell: Callable[[str], None],
) -> Iterator[Report]:
    """Look at a root again and again; only what is new is restored for its norms.

    Args:
        root: the directory given to the checkpoint manager; there may be no step in it yet.
        version: version of this library.
        item: name of the item directory, needed if steps hold several.
        norm_count: number of steps that are restored for norms, as for
            :func:`~adacheck_jax.tools.report.gather.gather`.
        every_s: seconds between two looks; more if a look takes long.
        tell: is told once of each reason that keeps a report from being made.

    Yields:
        A report whenever steps have come, gone or changed.

    Raises:
        InputError: there is no such root.
    """
    norms, before, said = Norms(), None, ""
    existing(root)
    while True:
        began = time.monotonic()
        now = steps_now(root)
        if now != before and now:
            try:
                found = gather(root, version, item, norm_count, norms)
            except (InputError, AdaCheckError, OSError) as error:
                # A step may have been deleted while it was looked at; the next look tells.
                why = " ".join(str(error).split())
                if why != said:
                    tell(f"waiting: {why}")
                said = why
            else:
                before, said = now, ""
                yield found
        elif not now and said != "empty":
            tell("waiting for the first step")
            said = "empty"
        took = time.monotonic() - began
        time.sleep(max(every_s, _SHARE * took))


def steps_now(root: AnyPath) -> frozenset[object]:
    """The steps under a root with what tells whether they are the same as before."""
    found = set[object]()
    for directory in roots.items_of(root):
        name = at(directory).below(at(root))
        try:
            found.add((name, manifest_file.stamp(directory)))
        except OSError:  # damaged, or being deleted
            found.add((name, None))
    others = [name for name in at(root).folders() if roots.TMP_SUFFIX not in name]
    return frozenset(found | set(others)) if found or others else frozenset()
