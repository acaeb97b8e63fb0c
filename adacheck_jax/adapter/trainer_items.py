"""Items and arguments that a trainer gives to Orbax, as this library saves and restores them.

Params and optimizer state in different items become one tree with the items' names at its top,
saved as one item that has all their names (``model_params+optimizer_state``): the update ties them,
each base has them all, and the name of the directory tells the parts. Other pytrees are saved under
their own names, each as a base. Nothing here writes or reads a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME

from adacheck_jax.adapter.arguments import RestoreArgs, SaveArgs
from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import located
from adacheck_jax.update.params_search import leaf_types, recorded_params
from adacheck_jax.update.recorder_state import find_nodes

_log = logging.getLogger(__name__)

_BETWEEN = "+"
"""Stands between the names of items that are saved together."""
_KEPT_COUNT = 8
"""Combinations of items that are remembered."""
ParamsPath = str | Mapping[str, str] | None
_SAVES = (ocp.args.StandardSave, ocp.args.PyTreeSave, SaveArgs)
_HANDLERS = (ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler)
_RESTORES = (ocp.args.StandardRestore, ocp.args.PyTreeRestore, RestoreArgs)


def registry(own: Any, given: Any, handlers: Mapping[str, Any]) -> Any:
    """A registry by which pytrees go to this library's handler, and all else where it went.

    Args:
        own: the handler.
        given: the trainer's registry, or None.
        handlers: the trainer's handlers by item; None for one that Orbax chooses.

    Raises:
        ValueError: a handler has no arguments that Orbax knows.
    """
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    made.add(None, SaveArgs, own)
    made.add(None, RestoreArgs, own)
    others = {name: each for name, each in handlers.items() if each is not None}
    entries = {} if given is None else dict(given.get_all_entries())
    entries |= {
        (name, args): each
        for name, each in others.items()
        if not isinstance(each, _HANDLERS)
        for args in checkpoint_args.get_registered_args_cls(each)
    }
    of_trees = {name for name, each in others.items() if isinstance(each, _HANDLERS)}
    for (name, args), each in entries.items():  # of an item Orbax asks one handler
        if not isinstance(each, _HANDLERS):
            made.add(name, args, each)
        elif name is not None:
            of_trees.add(name)
    of_trees |= {_BETWEEN.join(sorted(of_trees))} if of_trees else {DEFAULT_ITEM_NAME} - {*others}
    for name in of_trees:  # so that Orbax describes them unasked
        made.add(name, RestoreArgs, own)
    return made


def is_tree(args: Any) -> bool:
    """True for arguments of a pytree, also of a subclass that a trainer has made."""
    return isinstance(args, (*_SAVES, *_RESTORES))


class Ties:
    """Items that one update ties, so that they are saved together, by the names of all.

    Args:
        has_recorder: False if the handler has no Recorder, so that no update ties anything.
        params_path: as given to the handler. Of params and optimizer state in different items it
            begins with the name of an item.
    """

    def __init__(self, has_recorder: bool, params_path: ParamsPath) -> None:
        self._has_recorder, self._params_path = has_recorder, params_path
        self._known: dict[Hashable, frozenset[str]] = {}

    def saving(self, args: Any) -> tuple[Any, str | None, Sequence[str]]:
        """Arguments of a save, of this library where they are of pytrees.

        With the name of the item that holds what an update ties, None if there is none, and those
        of all other pytrees.

        Raises:
            ValueError: the name of an item looks like names of several.
        """
        if not isinstance(args, ocp.args.Composite):
            return save_args(args) if is_tree(args) else args, None, ()
        given = {name: save_args(args[name]) for name in sorted(args) if is_tree(args[name])}
        if bad := [name for name in given if _BETWEEN in name]:
            raise ValueError(
                f"expected names of items without {_BETWEEN!r}, which stands between the names of "
                f"those that are saved together, found {bad}. Nothing was saved; rename them."
            )
        tied = self._tied({name: each.state for name, each in given.items()})
        asked = {name: given.get(name, each) for name, each in args.items() if name not in tied}
        others = tuple(name for name in given if name not in tied)
        if not tied:
            return ocp.args.Composite(**asked), None, others
        name, parts = _BETWEEN.join(sorted(tied)), {each: given[each] for each in sorted(tied)}
        asked[name] = parts[name] if len(parts) == 1 else _together(parts)
        return ocp.args.Composite(**asked), name, others

    def _tied(self, states: Mapping[str, PyTree]) -> frozenset[str]:
        """Names of the items with a Recorder's state and with the params that it updates."""
        if not (self._has_recorder and states):
            return frozenset()
        key = tuple((name, jax.tree.structure(each)) for name, each in states.items())
        if key not in self._known:
            if len(self._known) >= _KEPT_COUNT:
                self._known.clear()
            self._known[key] = self._found(states)
        return self._known[key]

    def _found(self, states: Mapping[str, PyTree]) -> frozenset[str]:
        if self._params_path is not None:  # below the one item that has all, or with its name
            for name, state in states.items():
                leaves = leaf_types(trees.flatten(state)[0])
                with contextlib.suppress(RecorderError):
                    if nodes := find_nodes([*leaves]):
                        recorded_params(nodes, leaves, self._params_path)
                        return frozenset({name})
        leaves = leaf_types(trees.flatten({**states})[0])
        if not (nodes := find_nodes([*leaves])):
            _log.warning(
                "Items %s are saved as bases: no Recorder's state is in them. For deltas save with "
                "them the state of an optimizer that contains the Recorder given to plug_in.",
                ", ".join(states),
            )
            return frozenset()
        params = recorded_params(nodes, leaves, self._params_path)
        tied = frozenset(path.split("/")[0] for path in (*params, *(n.prefix for n in nodes)))
        if self._params_path is not None and len(tied) == 1:
            raise RecorderError(
                f"expected params_path below the item {min(tied)!r}, which is saved alone, found "
                f"{self._params_path!r}. Leave the name of the item out of it."
            )
        return tied


def _expect_known(args: Any, known: tuple[type, ...], done: str) -> None:
    """Raises ValueError where a trainer's subclass of arguments says more than Orbax's class."""
    base = next(each for each in known if isinstance(args, each))
    names = {each.name for each in dataclasses.fields(base)}
    for each in dataclasses.fields(args):
        if each.name not in names and getattr(args, each.name) not in (None, each.default):
            raise ValueError(
                f"expected arguments of {base.__name__} alone, found {type(args).__name__} with "
                f"{each.name}=, of which this library does not know the meaning. Nothing was "
                f"{done}; leave it out."
            )


def save_args(args: Any) -> SaveArgs:
    """Arguments of this library that say the same as stock ones of a save.

    Raises:
        ValueError: a trainer's subclass of them says more.
    """
    if isinstance(args, SaveArgs):
        return args
    _expect_known(args, _SAVES, "saved")
    said, usual = args.save_args, ocp.SaveArgs()
    if said is not None and all(each in (None, usual) for each in jax.tree.leaves(said)):
        said = None
    size = getattr(args, "ocdbt_target_data_file_size", None)
    return SaveArgs(
        args.item,
        save_args=said,
        custom_metadata=args.custom_metadata,
        ocdbt_target_data_file_size=size,
    )


def _together(parts: Mapping[str, SaveArgs]) -> SaveArgs:
    """Arguments of one save of all parts."""
    said = custom = None
    if any(each.save_args is not None for each in parts.values()):
        said = {
            name: each.save_args or jax.tree.map(lambda _: ocp.SaveArgs(), each.state)
            for name, each in parts.items()
        }
    if any(each.custom_metadata is not None for each in parts.values()):
        custom = {name: each.custom_metadata for name, each in parts.items()}
    sizes = [each.ocdbt_target_data_file_size for each in parts.values()]
    return SaveArgs(
        {name: each.state for name, each in parts.items()},
        save_args=said,
        custom_metadata=custom,
        ocdbt_target_data_file_size=max((s for s in sizes if s is not None), default=None),
    )


def restore_args(args: Any) -> RestoreArgs:
    """Arguments of this library that ask for the same as stock ones of a restore; None for all.

    Raises:
        ValueError: they ask for a transformation that Orbax or a trainer alone knows.
    """
    if args is None or isinstance(args, RestoreArgs):
        return args or RestoreArgs()
    _expect_known(args, _RESTORES, "restored")
    if isinstance(args, ocp.args.StandardRestore):
        names = ("item", "strict", "support_layout", "fallback_sharding")
    else:
        names = ("item", "restore_args", "transforms", "partial_restore")
        if args.legacy_transform_fn is not None:
            raise ValueError(
                "legacy_transform_fn: expected None, found a function. Nothing was restored; use "
                "adacheck.RestoreArgs(rules=...), with rules of adacheck_jax.layout."
            )
    return RestoreArgs(**{name: getattr(args, name) for name in names if hasattr(args, name)})


@dataclass(frozen=True)
class StepItems:
    """Directories of the items of one step, by their names on the disk."""

    directories: Mapping[str, epath.Path]

    @classmethod
    def of(cls, step: epath.Path) -> StepItems:
        """Those of a step; none if it is not there."""
        there = step.iterdir() if step.exists() else ()
        return cls({each.name: each for each in there if each.is_dir()})

    def is_tree(self, name: str) -> bool:
        """True for a pytree, by whomever it was saved."""
        path = located(str(self.directories[name])) if name in self.directories else None
        return path is not None and (roots.is_stock(path) or roots.is_ours(path))

    def holder(self, name: str) -> str:
        """The item on the disk that has an item of the trainer's."""
        if name in self.directories:
            return name
        return next((each for each in self.directories if name in each.split(_BETWEEN)), name)

    def restoring(self, args: Any, metadata: Callable[[epath.Path], Any]) -> Any:
        """Arguments of a restore, by the items on the disk.

        Args:
            args: the trainer's, by its own names.
            metadata: describes a pytree.

        Raises:
            KeyError: the step has other items.
        """
        asked: dict[str, Any] = {}
        parts: dict[str, dict[str, RestoreArgs]] = {}
        for name, each in args.items():
            holder = self.holder(name)
            if holder not in self.directories and not getattr(each, "skip_damaged", False):
                self._refuse(name)
            if is_tree(each) or (each is None and self.is_tree(holder)):
                parts.setdefault(holder, {})[name] = restore_args(each)
            else:
                asked[name] = each
        for holder, each in parts.items():
            if [*each] == [holder]:
                asked[holder] = each[holder]
            else:
                described = functools.partial(metadata, self.directories[holder])
                asked[holder] = _parts(holder, each, described)
        return ocp.args.Composite(**asked)

    def _refuse(self, name: str) -> None:
        if not self.directories:  # there is no step, which Orbax tells
            return
        where = next(iter(self.directories.values())).parent
        names = sorted(part for each in self.directories for part in each.split(_BETWEEN))
        raise KeyError(f"{where}: expected items of the step, {names}, found {name!r}")


def _parts(
    holder: str, parts: Mapping[str, RestoreArgs], metadata: Callable[[], Any]
) -> RestoreArgs:
    """Arguments of one restore of some items that were saved together.

    Raises:
        ValueError: they are to be restored in different ways.
    """
    first = next(iter(parts.values()))
    ways = [{**vars(each), "abstract_state": None} for each in parts.values()]
    if any(way != ways[0] for way in ways):
        raise ValueError(
            f"items {[*parts]}: expected the same options of a restore for items that were saved "
            f"together, found {ways}. Nothing was restored; restore one after the other."
        )
    wanted = {
        name: parts[name].abstract_state if name in parts else ocp.PLACEHOLDER
        for name in holder.split(_BETWEEN)
    }
    if any(each is None for each in wanted.values()):
        tree = metadata().tree
        wanted = {name: tree[name] if each is None else each for name, each in wanted.items()}
    return dataclasses.replace(first, abstract_state=wanted)


def apart(found: Any, names: Iterable[str] | None = None) -> Any:
    """The restored items, under the trainer's names; all of them if none are named."""
    parts: dict[str, PyTree] = {}
    for name, each in found.items():
        if _BETWEEN in name and isinstance(each, Mapping):
            parts |= each
        else:
            parts[name] = each
    return type(found)(**{name: parts[name] for name in (parts if names is None else names)})


def described(items: Mapping[str, Any]) -> dict[str, Any]:
    """Orbax's metadata of items, under the trainer's names."""
    shown: dict[str, Any] = {}
    for name, each in items.items():
        if _BETWEEN not in name or not hasattr(each, "tree"):
            shown[name] = each
            continue
        custom = each.custom_metadata or {}
        for part in name.split(_BETWEEN):
            shown[part] = type(each).build(each.tree[part], custom_metadata=custom.get(part))
    return shown
