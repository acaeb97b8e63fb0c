"""Tie the update to the saved leaves, export it, and fold it over records.

The update program is ``tx.update`` followed by ``optax.apply_updates``, traced once over flat
leaves and exported with ``jax.export`` for each platform, so that a process that has never seen
the optimizer can replay it, on any mesh: a program exported for one device keeps the partitioning
of the arrays that it is called with.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import optax

from adacheck_jax import purity, staging, trees, vetting
from adacheck_jax.errors import FormatError, IntegrityError, RecorderError, first_line
from adacheck_jax.manifest import Update
from adacheck_jax.recorder import Recorder, RecorderNode, UpdateSignature, find_node

_log = logging.getLogger(__name__)

PLATFORMS = ("cpu", "cuda", "tpu")
_WRAPPER_SUFFIX = "/value"  # nnx.State keeps every array under one more key of this name

Leaves = Sequence[Any]
UpdateFunction = Callable[[Leaves, Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]
"""``(params, inner, record, extra) -> (params, inner)``, over flat leaves."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The recorder's update, tied to leaf paths of one saved state.

    Attributes:
        signature: the trees that the update takes.
        params, inner, record, extra: leaf paths in the state, in argument order.
        count: leaf path of the update counter.
    """

    signature: UpdateSignature
    params: tuple[str, ...]
    inner: tuple[str, ...]
    record: tuple[str, ...]
    extra: tuple[str, ...]
    count: str

    @property
    def explained(self) -> frozenset[str]:
        """Leaf paths that replay computes."""
        return frozenset(self.params + self.inner)

    @property
    def consumed(self) -> tuple[str, ...]:
        """Leaf paths that the update consumes, and that every delta stores."""
        return self.record + self.extra


def bind(
    recorder: Recorder, shapes: Mapping[str, tuple[int, ...]], params_path: str | None
) -> Binding:
    """Finds the recorder's node, and the params that its updates are applied to, in a state.

    Args:
        recorder: the one that the optimizer was built with.
        shapes: shape of every leaf of the state, by leaf path.
        params_path: leaf path of the params' root, or None to find it.

    Raises:
        RecorderError: no recorder in the state, several, or no one tree that must be the params.
    """
    node = find_node(list(shapes))
    if node is None:
        raise RecorderError(
            "AdaCheckHandler has a recorder, but the saved state holds no Recorder's state. "
            "Expected the optimizer state of a chain that contains this very Recorder; found the "
            f"leaves {_few(shapes)}. Save the optimizer state too, or build the handler without "
            "a recorder."
        )
    signature = _signature_of(recorder, node, shapes)
    relative = {tree: list(trees.flatten(getattr(signature, tree))[0]) for tree in _TREES}
    root = params_path if params_path is not None else _find_params(node, relative, shapes)
    return Binding(
        signature=signature,
        params=_params_under(root, relative["params"], node, shapes),
        inner=_pick(relative["inner"], node.inner, "optimizer state"),
        record=_pick(relative["params"], node.record, "record"),
        extra=_pick(relative["extra"], node.extra, "extra arguments"),
        count=node.count,
    )


def recorded_params(
    node: RecorderNode, shapes: Mapping[str, tuple[int, ...]], params_path: str | None
) -> tuple[str, ...]:
    """Leaf paths of the params that a record is of, found without the recorder's object.

    Args:
        node: where the recorder's state lies.
        shapes: shape of every leaf of the state, by leaf path.
        params_path: leaf path of the params' root, or None to find it.

    Raises:
        RecorderError: there is no one tree that must be the params.
    """
    relative = {"params": list(node.record)}
    root = params_path if params_path is not None else _find_params(node, relative, shapes)
    return _params_under(root, relative["params"], node, shapes)


_TREES = ("params", "inner", "extra")


def _signature_of(
    recorder: Recorder, node: RecorderNode, shapes: Mapping[str, tuple[int, ...]]
) -> UpdateSignature:
    for signature in recorder.signatures:
        leaves, _ = trees.flatten(signature.params)
        found = _matched(list(leaves), node.record)
        if len(leaves) == len(node.record) and all(
            path in found and shapes[found[path]] == leaf.shape for path, leaf in leaves.items()
        ):
            return signature
    raise RecorderError(
        f"the Recorder given to AdaCheckHandler has not seen the {len(node.record)} params that "
        f"are recorded at {node.prefix!r}; it has seen {len(recorder.signatures)} other trees. "
        "Build the optimizer with the same Recorder object that the handler gets, and create or "
        "abstractly create (jax.eval_shape) its state before saving or restoring."
    )


def _find_params(
    node: RecorderNode, relative: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """The one subtree outside the recorder that has the record's leaf paths and shapes."""
    wanted = {path: shapes[node.record[path]] for path in node.record}
    if not wanted:
        raise RecorderError(
            f"the Recorder at {node.prefix!r} records no leaves, so nothing can be replayed."
        )
    sample = max(wanted, key=lambda path: path.count("/"))
    candidates = []
    inside = _join(node.prefix, "")
    for path in shapes:
        if path.startswith(inside) or not _ends_with(path, sample):
            continue
        root = path.removesuffix(sample).removesuffix("/")
        if all(shapes.get(_join(root, p) if p else root) == s for p, s in wanted.items()):
            candidates.append(root)
    if len(candidates) == 1:
        return candidates[0]
    found = ", ".join(repr(c) for c in sorted(candidates)) or "none"
    raise RecorderError(
        f"expected one subtree with the {len(wanted)} leaf paths and shapes that the Recorder at "
        f"{node.prefix!r} records; found {found}. Say which of them the optimizer updates: "
        "AdaCheckHandler(recorder, params_path=...)."
    )


def _ends_with(path: str, end: str) -> bool:
    return not end or path == end or path.endswith(f"/{end}")


def _params_under(
    root: str, relative: Sequence[str], node: RecorderNode, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    below = _join(root, "")
    available = {path.removeprefix(below): path for path in shapes if path.startswith(below)}
    if root in shapes:  # one bare array
        available[""] = root
    params = _pick(relative, available, "params")
    records = _pick(relative, node.record, "record")
    for path, record in zip(params, records, strict=True):
        if shapes[path] != shapes[record]:
            raise RecorderError(
                f"expected the params under {root!r} to have the shapes that the Recorder records, "
                f"found {path} of shape {shapes[path]} for a record of shape {shapes[record]}. "
                "Name the trained params with params_path."
            )
    return params


def _pick(relative: Sequence[str], available: Mapping[str, str], what: str) -> tuple[str, ...]:
    matched = _matched(relative, available)
    missing = [path for path in relative if path not in matched]
    if missing:
        raise RecorderError(
            f"{len(missing)} leaves of the {what} that the update takes are not in the saved "
            f"state: expected {_few(missing)}; found {_few(available)}. Save the whole train "
            "state, or name the params with params_path."
        )
    return tuple(matched[path] for path in relative)


def _matched(relative: Sequence[str], available: Mapping[str, str]) -> dict[str, str]:
    """Each relative path's place: the same path, or one that differs by nnx's wrapper alone."""
    plain = {_plain(path): full for path, full in available.items() if path not in relative}
    matched = {path: available.get(path) or plain.get(_plain(path)) for path in relative}
    return {path: full for path, full in matched.items() if full is not None}


def _plain(path: str) -> str:
    return path.removesuffix(_WRAPPER_SUFFIX)


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path


def _few(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def update_function(recorder: Recorder, signature: UpdateSignature) -> UpdateFunction:
    """The update over flat leaves, as the train step runs it; typed PRNG keys as their data."""
    treedefs = {name: jax.tree.structure(getattr(signature, name)) for name in _TREES}
    specs = jax.tree.leaves(signature.inner)

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves
    ) -> tuple[list[Any], list[Any]]:
        params_tree = jax.tree.unflatten(treedefs["params"], params)
        updates, inner_tree = recorder.tx.update(
            jax.tree.unflatten(treedefs["params"], record),
            jax.tree.unflatten(treedefs["inner"], map(_keyed, specs, inner)),
            params_tree,
            **jax.tree.unflatten(treedefs["extra"], extra),
        )
        applied = optax.apply_updates(params_tree, updates)
        return jax.tree.leaves(applied), [*map(staging.raw, jax.tree.leaves(inner_tree))]

    return run


def _keyed(spec: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    if not staging.is_key(spec):
        return leaf
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), spec)
    return jax.random.wrap_key_data(leaf, impl=impls[0])


def export(
    function: UpdateFunction,
    arguments: Sequence[Sequence[jax.ShapeDtypeStruct]],
    platforms: Sequence[str] = PLATFORMS,
) -> dict[str, bytes]:
    """Exports the update program for each platform, over one device.

    One program a platform: a program for several at once is compiled to other arithmetic than the
    train step (it carries the platform as an argument, and XLA then rewrites divisions otherwise).

    Args:
        function: from :func:`update_function`.
        arguments: shapes and data types of the four lists of leaves.
        platforms: to export for, besides this one.

    Returns:
        The serialized programs by platform, this process's platform at least. The same update gives
        the same bytes in every process.
    """
    jitted, here = jax.jit(function), platform()
    programs = {}
    with _no_tracebacks():
        for each in dict.fromkeys((here, *platforms)):
            try:
                exported = jax.export.export(jitted, platforms=(each,))(*arguments)
                purity.check(exported, f"the update for {each}")  # or no restore would run it
            except Exception as error:
                if each == here:
                    raise
                _log.info("The update cannot be exported for %s: %s", each, error)
                continue
            programs[each] = bytes(exported.serialize())
            vetting.trust(programs[each])
    return programs


def platform() -> str:
    """The platform of this process's default devices, as ``jax.export`` names it."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


@contextlib.contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Keeps the caller's stack out of the program's debug locations: same update, same bytes."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def begin(data: bytes, update: Update) -> None:
    """Starts in the background what :func:`load` will wait for."""
    if hashlib.sha256(data).hexdigest() == update.programs.get(platform()):
        vetting.begin(data)


def load(data: bytes, update: Update, where: str) -> UpdateFunction:
    """Reads an exported update program, and refuses one that does more than compute.

    Raises:
        IntegrityError: the bytes are not those that were written.
        FormatError: this jax cannot read it, or it is not pure, or it ends whoever parses it. What
            is returned raises it where the program does not take the leaves that it is called with.
    """
    if hashlib.sha256(data).hexdigest() != update.programs.get(platform()):
        raise IntegrityError(
            f"{where}: the exported update does not match its digest in the manifest "
            f"(found {len(data)} bytes). The file was changed after it was written; restore a "
            "base step, or give AdaCheckHandler the recorder and remove nothing."
        )
    vetting.check(data, where)
    try:
        exported = jax.export.deserialize(bytearray(data))
        purity.check(exported, where)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(
            f"{where}: the update was exported by jax {update.jax_version}, and jax "
            f"{jax.__version__} cannot read it ({first_line(error)}). Install that jax, or give "
            "AdaCheckHandler the Recorder that the optimizer was built with."
        ) from error
    function = _caller(exported)

    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves
    ) -> tuple[list[Any], list[Any]]:
        try:
            new_params, new_inner = function(params, inner, record, extra)
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


def from_bytes(data: bytes) -> UpdateFunction:
    """The update function of an exported program that this process wrote.

    It is partitioned otherwise than the function that it was exported from, wherever axes are
    Explicit: what trains, what proves and what restores an update with sums in it is this one.
    """
    return _caller(jax.export.deserialize(bytearray(data)))


def _caller(exported: jax.export.Exported) -> UpdateFunction:
    def run(
        params: Leaves, inner: Leaves, record: Leaves, extra: Leaves
    ) -> tuple[list[Any], list[Any]]:
        result: Any = exported.call(list(params), list(inner), list(record), list(extra))
        return result

    return run


def compile_fold(
    function: UpdateFunction, params: Iterable[jax.Array], inner: Iterable[jax.Array]
) -> UpdateFunction:
    """Compiles the update for the shardings of these arrays, donating the state.

    Memory stays at one state plus one record: the returned function consumes its ``params`` and
    ``inner`` and returns the next ones in their place, with the same shardings.
    """
    params = list(params)
    kept = common_shardings([*params, *inner])
    return fold(function, kept[: len(params)], kept[len(params) :])


def fold(function: UpdateFunction, params: Sequence[Any], inner: Sequence[Any]) -> Any:
    """As :func:`compile_fold`, given the shardings of ``params`` and ``inner`` themselves."""
    return jax.jit(function, out_shardings=([*params], [*inner]), donate_argnums=(0, 1))


def common_shardings(arrays: Sequence[Any]) -> list[jax.sharding.Sharding | None]:
    """The shardings that results in the place of some arrays can keep.

    One program has one set of devices: None for an array that does not lie on the largest one, such
    as a counter that was made on one device.
    """
    found = [array.sharding if isinstance(array, jax.Array) else None for array in arrays]
    sets = [sharding.device_set for sharding in found if sharding is not None]
    largest = max(sets, key=len, default=None)
    return [s if s is not None and s.device_set == largest else None for s in found]
