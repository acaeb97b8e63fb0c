"""A pinned update program as several small ones: equal components are compiled once.

Pinned, an update computes the same bits in any program, so also in these. Its operations were
vetted as one program; these have no others.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.export
import jax.extend.mlir
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from adacheck_jax.errors import first_line
from adacheck_jax.update.compiling import components
from adacheck_jax.update.compiling.components import Component, Cut, Graph, Node

_log = logging.getLogger(__name__)

Call = Callable[..., Any]
"""A component over arrays: its inputs, then its scalars; it returns the list of its outputs."""


@dataclass(frozen=True, slots=True)
class CutProgram:
    """An update as a program for what all leaves share, and one for each kind of component.

    Attributes:
        cut: the plan.
        takes, returns: shapes and data types of the update's arguments and results.
        results: the update's results, as values of the plan.
        shared: program of what the components share.
        calls: program of each component; equal ones have the same.
        scalars: shape and data type of each value that the first program computes.
    """

    cut: Cut
    takes: Sequence[jax.ShapeDtypeStruct]
    returns: Sequence[jax.ShapeDtypeStruct]
    results: tuple[int, ...]
    shared: Call
    calls: tuple[Call, ...]
    scalars: dict[int, jax.ShapeDtypeStruct]


def cut_up(exported: jax.export.Exported) -> CutProgram | None:
    """Cut a vetted, pinned update; None if that gains nothing, or is not known how.

    Args:
        exported: the update, which takes its switches last.
    """
    try:
        with mlir.make_ir_context():
            return _Module(exported).cut_up()
    except Exception as error:  # another jax may have other names: the whole program still runs
        _log.info("An update is compiled as one program: %s", first_line(error))
        return None


def compiled(
    program: CutProgram, leaves: Sequence[Sequence[jax.ShapeDtypeStruct]], switches: jax.Array
) -> Any:
    """Compile a cut update for leaves on some shardings; it donates params and optimizer state.

    Args:
        program: the update.
        leaves: its four lists of leaves, with shardings.
        switches: an example of its last argument.

    Returns:
        The update, of the type of :data:`~adacheck_jax.update.program.UpdateFunction`.

    Raises:
        ValueError: it takes other leaves, or does not return those that it replaces.
    """
    params_count, state_count = len(leaves[0]), len(leaves[0]) + len(leaves[1])
    taken = [x for each in leaves for x in each]
    taken.append(jax.ShapeDtypeStruct(switches.shape, switches.dtype, sharding=switches.sharding))
    if _types(taken) != _types(program.takes):
        raise ValueError("the update takes other leaves")
    if _types(taken[:state_count]) != _types(program.returns):
        raise ValueError("the update returns other leaves than it replaces")
    specs: dict[int, Any] = dict(enumerate(taken))
    replaced = dict(zip(program.results, taken[:state_count], strict=True))
    for value, each in program.scalars.items():
        sharding = replaced[value].sharding if value in replaced else switches.sharding
        specs[value] = jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
    shared = program.cut.shared
    own = jax.jit(program.shared, out_shardings=[specs[v].sharding for v in shared.outputs])
    scalars_of = own.lower(*(specs[v] for v in shared.scalars)).compile()
    specs |= replaced
    batches = [
        (call, _taken(batch, state_count), batch[0].scalars, [each.outputs for each in batch])
        for call, batch in _batches(program, specs, state_count)
    ]

    def run(params: Any, inner: Any, record: Any, extra: Any, switches: Any) -> Any:
        values = dict(enumerate((*params, *inner, *record, *extra, switches)))
        made = scalars_of(*[values[v] for v in shared.scalars])
        values.update(zip(shared.outputs, made, strict=True))
        for call, taken, scalars, outputs in batches:
            state, rest = [[[values[v] for v in own] for own in each] for each in taken]
            results = call(state, rest, [values[v] for v in scalars])
            for own, result in zip(outputs, results, strict=True):
                values.update(zip(own, result, strict=True))
        every = [values[v] for v in program.results]
        return every[:params_count], every[params_count:]

    return run


def _taken(batch: Sequence[Component], state_count: int) -> tuple[list[list[int]], list[list[int]]]:
    """The donated and the other inputs of each component."""
    donated = [[v for v in each.inputs if v < state_count] for each in batch]
    return donated, [[v for v in each.inputs if v >= state_count] for each in batch]


def _types(specs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    return [(each.shape, each.dtype) for each in specs]


def _batches(
    program: CutProgram, specs: Mapping[int, Any], state_count: int
) -> Iterator[tuple[Call, list[Component]]]:
    """Compiled programs, each with the equal components that it computes in one call.

    A call takes about a hundredth of the time that compiling one component takes. So a hundred
    updates are soonest done in batches of about the root of the number.
    """
    alike: dict[Any, list[int]] = {}
    for n, each in enumerate(program.cut.components):
        shardings = [specs[v].sharding for v in (*each.inputs, *each.outputs)]
        alike.setdefault((each.kind, each.scalars, *shardings), []).append(n)
    for group in alike.values():
        size = math.ceil(math.sqrt(len(group)))
        compiled: dict[int, Call] = {}
        for start in range(0, len(group), size):
            batch = [program.cut.components[n] for n in group[start : start + size]]
            if len(batch) not in compiled:
                call = program.calls[group[0]]
                compiled[len(batch)] = _compiled_batch(call, batch, specs, state_count)
            yield compiled[len(batch)], batch


def _compiled_batch(
    call: Call, batch: Sequence[Component], specs: Mapping[int, Any], state_count: int
) -> Call:
    """Program for some equal components: of their donated state, their other inputs, scalars."""

    def component(state: list[Any], rest: list[Any], scalars: list[Any]) -> list[Any]:
        return [call(*own, *other, *scalars) for own, other in zip(state, rest, strict=True)]

    state, rest = [[[specs[v] for v in own] for own in each] for each in _taken(batch, state_count)]
    shardings = [[specs[v].sharding for v in each.outputs] for each in batch]
    jitted = jax.jit(component, out_shardings=shardings, donate_argnums=0)
    return jitted.lower(state, rest, [specs[v] for v in batch[0].scalars]).compile()


class _Module:
    """The module of a program, and its values by number.

    Args:
        exported: the program.
    """

    def __init__(self, exported: jax.export.Exported) -> None:
        self._exported = exported
        self._module = ir.Module.parse(exported.mlir_module())
        self._functions = {
            ir.StringAttr(each.attributes["sym_name"]).value: each
            for each in self._module.body.operations
        }
        (block,) = self._functions["main"].regions[0].blocks
        *operations, returned = block.operations
        kept = exported.module_kept_var_idx
        self._numbers = dict(zip(block.arguments, kept, strict=True))
        self._values = dict(zip(kept, block.arguments, strict=True))
        self._count = len(exported.in_avals)
        self._nodes: list[Node] = []
        self._operations: list[Any] = []
        known: dict[Any, tuple[int, ...]] = {}
        for each in operations:
            self._number(each, known)
        self._returned = tuple(self._numbers[value] for value in returned.operands)

    def _number(self, operation: Any, known: dict[Any, tuple[int, ...]]) -> None:
        """Number the results of an operation; equal operations have the same results."""
        key = self._key(operation)
        operands = tuple(self._numbers[value] for value in operation.operands)
        results = known.get((key, operands))
        if results is None:
            results = tuple(range(self._count, self._count + len(operation.results)))
            self._count += len(results)
            self._values |= dict(zip(results, operation.results, strict=True))
            self._nodes.append(Node(key, operands, results))
            self._operations.append(operation)
            known[key, operands] = results
        self._numbers |= dict(zip(operation.results, results, strict=True))

    def cut_up(self) -> CutProgram | None:
        avals = self._exported.in_avals
        types: list[Any] = [None] * self._count
        counts = [0] * self._count
        for number, value in self._values.items():
            types[number] = str(value.type)
            counts[number] = math.prod(ir.RankedTensorType(value.type).shape)
        shared = {i for i, aval in enumerate(avals) if not aval.shape} | {len(avals) - 1}
        graph = Graph(len(avals), frozenset(shared), types, counts, self._nodes, self._returned)
        cut = components.plan(graph)
        if cut is None:
            return None
        made: dict[Any, Call] = {}
        for each in cut.components:
            if each.kind not in made:
                made[each.kind] = self._call(each)
        calls = tuple(made[each.kind] for each in cut.components)
        specs = [[*map(self._spec, each)] for each in (range(len(avals)), self._returned)]
        scalars = {value: self._spec(value) for value in cut.shared.outputs}
        return CutProgram(
            cut, specs[0], specs[1], self._returned, self._call(cut.shared), calls, scalars
        )

    def _key(self, operation: Any) -> Any:
        """All that an operation does, but for its operands."""

        def look(inner: Any) -> ir.WalkResult:
            if inner != operation.operation and any(v in self._numbers for v in inner.operands):
                raise ValueError(f"{operation.name} takes values that are not its operands")
            return ir.WalkResult.ADVANCE

        regions = ""
        if len(operation.regions):
            operation.operation.walk(look)
            regions = "".join(str(block) for r in operation.regions for block in r.blocks)
        attributes = tuple((each.name, str(each.attr)) for each in _attributes(operation))
        types = tuple(str(value.type) for value in operation.results)
        return operation.operation.name, attributes, types, regions

    def _spec(self, value: int) -> jax.ShapeDtypeStruct:
        if value < len(self._exported.in_avals):  # it need not be in the module
            aval = self._exported.in_avals[value]
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        found = ir.RankedTensorType(self._values[value].type)
        return jax.ShapeDtypeStruct(tuple(found.shape), _dtype(str(found.element_type)))

    def _call(self, component: Component) -> Call:
        """A component as an exported program of its own."""
        taken = [*component.inputs, *component.scalars]
        specs = [self._spec(value) for value in taken], [*map(self._spec, component.outputs)]
        avals = [[jax.core.ShapedArray(x.shape, x.dtype) for x in each] for each in specs]
        trees = jax.tree.structure((tuple(taken), {})), jax.tree.structure([*component.outputs])
        whole = self._exported
        part = dataclasses.replace(
            whole,
            fun_name="component",
            in_tree=trees[0],
            in_avals=tuple(avals[0]),
            out_tree=trees[1],
            out_avals=tuple(avals[1]),
            in_shardings_hlo=(None,) * len(taken),
            out_shardings_hlo=(None,) * len(component.outputs),
            module_kept_var_idx=tuple(range(len(taken))),
            mlir_module_serialized=self._serialized(component, taken),
            **_named_shardings(whole, len(taken), len(component.outputs)),
        )
        return part.call

    def _serialized(self, component: Component, taken: Sequence[int]) -> bytes:
        with ir.Location.unknown():
            module = ir.Module.create()
            for each in _attributes(self._module.operation):
                module.operation.attributes[each.name] = each.attr
            types = [[self._values[v].type for v in each] for each in (taken, component.outputs)]
            with ir.InsertionPoint(module.body):
                main = func.FuncOp("main", (types[0], types[1]), visibility="public")
                for function in self._called(component):
                    function.operation.clone()
            block = main.add_entry_block()
            now = dict(zip(taken, block.arguments, strict=True))
            with ir.InsertionPoint(block):
                for n in component.nodes:
                    copy = self._operations[n].operation.clone()
                    for k, value in enumerate(self._operations[n].operands):
                        copy.operands[k] = now[self._numbers[value]]
                    for old, new in zip(self._operations[n].results, copy.results, strict=True):
                        now[self._numbers[old]] = new
                func.ReturnOp([now[value] for value in component.outputs])
        version = stablehlo.get_minimum_version()
        return jax.extend.mlir.serialize_portable_artifact(str(module), version)

    def _called(self, component: Component) -> list[Any]:
        """The functions that a component calls, directly or not."""
        found: dict[str, Any] = {}

        def look(operation: Any) -> ir.WalkResult:
            if operation.name == "func.call":
                name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                if name not in found:
                    found[name] = self._functions[name]
                    found[name].operation.walk(look)
            return ir.WalkResult.ADVANCE

        for n in component.nodes:
            self._operations[n].operation.walk(look)
        return [*found.values()]


def _attributes(operation: Any) -> list[Any]:
    return [operation.attributes[n] for n in range(len(operation.attributes))]


def _named_shardings(whole: Any, inputs: int, outputs: int) -> dict[str, Any]:
    """Fields of newer releases of jax, for a program that says nothing of shardings."""
    known = {each.name for each in dataclasses.fields(whole)}
    wanted = {"_in_named_shardings": (None,) * inputs, "_out_named_shardings": (None,) * outputs}
    return {name: value for name, value in wanted.items() if name in known}


def _dtype(name: str) -> Any:
    if name == "i1":
        return jnp.dtype(bool)
    kinds = {"f": "float", "ui": "uint", "i": "int", "bf": "bfloat"}
    kind = name.rstrip("0123456789")
    return jnp.dtype(kinds[kind] + name[len(kind) :])
