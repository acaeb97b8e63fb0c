"""A pinned update program compiled as several small ones: equal parts are compiled once.

Pinned, an update computes the same bits in any program, so also in these. Its operations were
vetted as one program; these have no others. What cannot be cut so is compiled whole.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.extend.mlir
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from adacheck_jax.errors import first_line
from adacheck_jax.update import untrusted
from adacheck_jax.update.compiling import parts
from adacheck_jax.update.compiling.parts import Cut, Part

_log = logging.getLogger(__name__)

_SHARED_COUNT = 4096
"""Elements of the largest argument that parts may share, if it is not donated."""
_KINDS = {"f": "float", "ui": "uint", "i": "int", "bf": "bfloat"}

_Call = Callable[..., Any]
Spec = jax.ShapeDtypeStruct


def compiled(
    exported: jax.export.Exported, leaves: Sequence[Sequence[Spec]], switches: jax.Array
) -> Any:
    """Compile a vetted, pinned update in parts; they donate params and optimizer state.

    Args:
        exported: the update, which takes its switches last.
        leaves: its four lists of leaves, with shardings.
        switches: an example of its last argument.

    Returns:
        The update, of the type of :data:`~adacheck_jax.update.program.UpdateFunction`; None if that
        gains nothing or is not known how, also for leaves that it does not take.
    """
    taken = [x for each in leaves for x in each]
    taken.append(Spec(switches.shape, switches.dtype, sharding=switches.sharding))
    state_count = len(leaves[0]) + len(leaves[1])
    try:
        if _types(taken) != _types(exported.in_avals):
            raise ValueError("it takes other leaves")
        if _types(taken[:state_count]) != _types(exported.out_avals):
            raise ValueError("it returns other leaves than it replaces")
        cut = _cut(exported, state_count)
        return cut and _CutProgram(exported, cut, taken, state_count, len(leaves[0])).run
    except Exception as error:  # another jax may have other names: the whole program still runs
        _log.info("An update is compiled as one program: %s", first_line(error))
        return None


def _types(specs: Sequence[Any]) -> list[Any]:
    return [(each.shape, each.dtype) for each in specs]


def _cut(exported: jax.export.Exported, state_count: int) -> Cut | None:
    avals = exported.in_avals
    with mlir.make_ir_context() as context:
        module = untrusted.module_of(exported, context)
        functions: dict[str, str] = {}
        for each in module.body.operations:
            name = ir.StringAttr(each.attributes["sym_name"]).value
            text = each.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
            functions[name] = str(text)
        known = module.operation.attributes
        attributes = [f"{x} = {known[x]}" for x in known if x != "sym_name"]
    shared = [
        position
        for position, n in enumerate(exported.module_kept_var_idx)
        if not avals[n].shape or (n >= state_count and math.prod(avals[n].shape) <= _SHARED_COUNT)
    ]
    return parts.cut(functions.pop("main"), functions, ", ".join(attributes), shared)


class _CutProgram:
    """The compiled parts of an update, in batches of equal ones."""

    def __init__(
        self,
        exported: jax.export.Exported,
        cut: Cut,
        taken: Sequence[Spec],
        state_count: int,
        params_count: int,
    ) -> None:
        self._exported, self._cut, self._params_count = exported, cut, params_count
        # Arguments that no operation takes have no value in the program.
        self._position = dict(zip(cut.arguments, exported.module_kept_var_idx, strict=True))
        self._state_count = state_count
        specs = {value: taken[n] for value, n in self._position.items()}
        specs |= zip(cut.returned, taken, strict=False)  # on the shardings of what they replace
        for value in cut.shared.given:
            shape, element = cut.types[value]
            specs.setdefault(value, Spec(shape, _dtype(element), sharding=taken[-1].sharding))
        self._specs = specs
        self._steps: list[tuple[_Call, list[Part]]] = [
            *self._batches([cut.shared] if cut.shared.given else []),
            *self._batches(cut.parts),
        ]

    def run(self, params: Any, inner: Any, record: Any, extra: Any, switches: Any) -> Any:
        """The update; its parts are dispatched one after the other."""
        every = (*params, *inner, *record, *extra, switches)
        values = {value: every[n] for value, n in self._position.items()}
        for call, batch in self._steps:
            results = call(*([[values[v] for v in x] for x in xs] for xs in self._taken(batch)))
            for part, result in zip(batch, results, strict=True):
                values.update(zip(part.given, result, strict=True))
        returned = [values[v] for v in self._cut.returned]
        return returned[: self._params_count], returned[self._params_count :]

    def _taken(self, batch: Sequence[Part]) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
        """The values that parts take: own leaves of the state, which are donated, and the rest."""
        counts = [
            sum(self._position[v] < self._state_count for v in part.taken[: part.own_count])
            for part in batch
        ]
        pairs = [(part.taken[:n], part.taken[n:]) for part, n in zip(batch, counts, strict=True)]
        return [donated for donated, _ in pairs], [rest for _, rest in pairs]

    def _batches(self, every: Sequence[Part]) -> Iterator[tuple[_Call, list[Part]]]:
        """Compiled programs, each with the equal parts that it computes in one call.

        A call takes about a hundredth of the time that compiling one part takes. So a hundred
        updates are soonest done in batches of about the root of the number.
        """
        alike: dict[Any, list[Part]] = {}
        for part in every:
            shardings = [self._specs[v].sharding for v in (*part.taken, *part.given)]
            alike.setdefault((part.text, *shardings), []).append(part)
        for group in alike.values():
            call = jax.jit(self._call(group[0]))
            root = math.isqrt(len(group) - 1) + 1
            size = next((n for n in range(root, root // 2, -1) if len(group) % n == 0), root)
            compiled: dict[int, _Call] = {}
            for start in range(0, len(group), size):
                batch = group[start : start + size]
                if len(batch) not in compiled:
                    compiled[len(batch)] = self._compiled(call, batch)
                yield compiled[len(batch)], batch

    def _compiled(self, call: _Call, batch: Sequence[Part]) -> _Call:
        def run(state: list[Any], rest: list[Any]) -> list[Any]:
            return [call(*own, *other) for own, other in zip(state, rest, strict=True)]

        taken = [[[self._specs[v] for v in own] for own in each] for each in self._taken(batch)]
        shardings = [[self._specs[v].sharding for v in each.given] for each in batch]
        jitted = jax.jit(run, out_shardings=shardings, donate_argnums=0)
        return jitted.lower(*taken).compile()

    def _call(self, part: Part) -> _Call:
        """A part as an exported program of its own."""
        avals = [
            tuple(jax.core.ShapedArray(self._specs[v].shape, self._specs[v].dtype) for v in values)
            for values in (part.taken, part.given)
        ]
        nothing = [(None,) * len(each) for each in avals]
        version = stablehlo.get_current_version()
        return dataclasses.replace(
            self._exported,
            in_tree=jax.tree.structure((avals[0], {})),
            in_avals=avals[0],
            out_tree=jax.tree.structure([*avals[1]]),
            out_avals=avals[1],
            in_shardings_hlo=nothing[0],
            out_shardings_hlo=nothing[1],
            module_kept_var_idx=tuple(range(len(avals[0]))),
            mlir_module_serialized=jax.extend.mlir.serialize_portable_artifact(part.text, version),
            **{"_in_named_shardings": nothing[0], "_out_named_shardings": nothing[1]},
        ).call


def _dtype(name: str) -> Any:
    if name == "i1":
        return jnp.dtype(bool)
    kind = name.rstrip("0123456789")
    return jnp.dtype(_KINDS[kind] + name[len(kind) :])
