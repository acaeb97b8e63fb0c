"""Update programs as bytes: exported for each platform, and loaded, if they do nothing but compute.

A process that has never seen the optimizer can replay such a program on any mesh: exported for one
device, it is partitioned like the arrays that it is called with.

Any thread may load a program; what is shared is in :class:`~adacheck_jax.update.program.Kept`. One
thread at a time traces or exports: the lock of :func:`tracing` guards a setting of the process.
While it is held no other lock is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.export

from adacheck_jax.errors import FormatError, IntegrityError, first_line
from adacheck_jax.format.manifest import Update
from adacheck_jax.update import untrusted
from adacheck_jax.update.program import Kept, Leaves, UpdateFunction, platform
from adacheck_jax.update.untrusted import digest_of

_log = logging.getLogger(__name__)

PLATFORMS = ("cpu", "cuda", "tpu")

_tracing = threading.RLock()
_parsed: Kept[jax.export.Exported] = Kept(8)
"""Programs that were vetted, by digest of their bytes."""


def export(
    function: UpdateFunction,
    arguments: Sequence[Sequence[jax.ShapeDtypeStruct]],
    switches: Any,
    platforms: Sequence[str],
) -> dict[str, bytes]:
    """Export the update program for some platforms, over one device.

    One program a platform: a program for several platforms takes the platform as an argument, and
    XLA then rewrites divisions in another way than in the train step.

    Args:
        function: the update, from :func:`update_function` or :func:`joint_function`; under
            ``jax.jit`` it is not traced again.
        arguments: shapes and data types of its four lists of leaves.
        switches: an example of its last argument.
        platforms: platforms to export for.

    Returns:
        The serialized programs by platform; one is left out for which the update cannot be
        exported, unless it is this process's own. The same update gives the same bytes in every
        process.
    """
    jitted: Any = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    here = platform()
    programs = {}
    with tracing():
        for each in platforms:
            try:
                exported = jax.export.export(jitted, platforms=(each,))(*arguments, switches)
                # No restore would run a program that is refused here.
                untrusted.check_operations(exported, f"the update for {each}")
            except Exception as error:
                if each == here:
                    raise
                _log.info("The update cannot be exported for %s: %s", each, error)
                continue
            programs[each] = bytes(exported.serialize())
            untrusted.trust(programs[each])
    return programs


def vetted(data: bytes, update: Update, where: str) -> jax.export.Exported:
    """Parse an exported update program; refuse one that does more than compute.

    Raises:
        IntegrityError: the bytes are not those that were written.
        FormatError: this jax cannot read the program, or the program does more than compute, or it
            ends the process that parses it.
    """
    digest = digest_of(data)
    if digest != update.programs.get(platform()):
        raise IntegrityError(
            f"{where}: the exported update does not match its digest in the manifest "
            f"(found {len(data)} bytes). The file was changed after it was written; restore a "
            "base step, or give AdaCheckHandler the recorder and remove nothing."
        )
    untrusted.check_parses(data, where)
    if (exported := _parsed.get(digest)) is not None:
        return exported
    try:
        exported = jax.export.deserialize(bytearray(data))
        untrusted.check_operations(exported, where)
        _caller(exported)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(
            f"{where}: the update was exported by jax {update.jax_version}, and jax "
            f"{jax.__version__} cannot read it ({first_line(error)}). Install that jax, or give "
            "AdaCheckHandler the Recorder that the optimizer was built with."
        ) from error
    _parsed.put(digest, exported)
    return exported


def function_of(exported: jax.export.Exported, where: str) -> UpdateFunction:
    """The function of a vetted program; it raises FormatError for leaves that do not fit it."""
    function = _caller(exported)

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves, switches: Any
    ) -> tuple[list[Any], list[Any]]:
        try:
            new_params, new_inner = function(params, inner, record, extra, switches)
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"{where}: the exported update cannot be called with the leaves that the manifest "
                f"gives it ({first_line(error)}). Restore a base step, or give AdaCheckHandler "
                "the Recorder that the optimizer was built with."
            ) from error
        if _described(new_params, new_inner) != _described(params, inner):
            raise FormatError(
                f"{where}: expected an update that returns the {len(params)} params and "
                f"{len(inner)} leaves of optimizer state that it takes, found one that returns "
                "others. Restore a base step."
            )
        return new_params, new_inner

    return run


def _described(*lists: Leaves) -> list[list[tuple[Any, Any]]]:
    return [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in lists]


def load_own(data: bytes) -> UpdateFunction:
    """Load an update program that this process exported.

    On Explicit axes XLA partitions the exported program in another way than the function that it
    was exported from. So an update with sums is trained, checked and restored by this function.
    """
    return _caller(own(data))


def own(data: bytes) -> jax.export.Exported:
    """Parse an update program that this process exported."""
    return jax.export.deserialize(bytearray(data))


def _caller(exported: jax.export.Exported) -> UpdateFunction:
    positional, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    has_switches = len(positional) == 5  # programs of earlier releases take none

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves, switches: Any
    ) -> tuple[list[Any], list[Any]]:
        lists = (list(params), list(inner), list(record), list(extra))
        result: Any = exported.call(*lists, switches) if has_switches else exported.call(*lists)
        return result

    return run


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace as for an export: the same update gives the same bytes.

    The caller's stack stays out of the program's debug locations. A mesh in the program would bind
    it to its devices.
    """
    name = "jax_traceback_in_locations_limit"
    with _tracing:  # the setting is that of all threads
        limit = getattr(jax.config, name)
        jax.config.update(name, 0)
        try:
            with jax.set_mesh(None):
                yield
        finally:
            jax.config.update(name, limit)
