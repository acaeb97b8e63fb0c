"""Failures that a layout survives: by hand, and against what recoveries ask of the files left."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.memory import agreement, holdings
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.planned import (
    PlannedArray,
    PlannedDevice,
    PlannedSharding,
    PlannedSites,
    structure_of,
)
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.tools.plan import redundancy_report
from adacheck_jax.tools.survival import Survival
from adacheck_jax.update.binding import bind_all, recorders_of
from adacheck_jax.update.elements.sample_sites import Sites
from adacheck_jax.update.params_search import leaf_types
from tests import support
from tests.tools.test_plan import NAMES, placements

SHAPES = {"embedding": (3072, 512), "bias": (64,), "experts": (16, 512, 512)}


def state_of(mesh, specs):
    """An abstract state of adamw on a mesh, all trees of which lie as its params."""
    recorder = adacheck.Recorder(optax.adamw(1e-3))

    def leaf(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = {n: leaf(s, jnp.float32, *specs.get(n, ())) for n, s in SHAPES.items()}
    opt_state = optax.tree_map_params(
        recorder,
        lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(recorder.init, params),
        params,
        transform_non_params=lambda x: leaf(x.shape, x.dtype),
    )
    return {"params": params, "opt_state": opt_state, "step": leaf((), jnp.int32)}, recorder


def survival_of(mesh, specs, **options):
    state, recorder = state_of(mesh, specs)
    return redundancy_report(state, recorder, devices_per_process=1, **options).survival


def cut_along(*names):
    return {"embedding": (names,), "bias": (names,), "experts": (names,)}


MESH = AbstractMesh((4, 4), ("data", "fsdp"))


def test_data_parallelism_survives_the_loss_of_any_domain():
    found = survival_of(MESH, {})
    assert (found.domain_count, found.survived_domains, found.problem) == (16, 16, "")
    assert found.survived_pairs == 120 - 8, "two domains keep what each other owns"
    assert (found.partial.leaf_count, found.none.leaf_count) == (0, 0)
    assert found.full.leaf_bytes == found.full.copied_bytes > 0
    assert found.wire_bytes == 0
    assert found.process_bytes / 3 < found.copies_bytes < found.process_bytes
    without = survival_of(MESH, {}, copies=0)
    assert without.process_bytes == found.process_bytes - found.copies_bytes
    assert without.copies_bytes == 0
    assert without.survived_domains == 0


def test_of_what_is_cut_over_all_copies_are_sent():
    found = survival_of(MESH, cut_along("data", "fsdp"))
    assert (found.survived_domains, found.survived_pairs) == (16, 120 - 8)
    assert found.full.leaf_bytes == 12  # the counters, which lie everywhere
    assert found.partial.leaf_count == 0
    assert found.none.copied_bytes == found.none.leaf_bytes > 0
    assert found.wire_bytes == found.none.leaf_bytes / 4, "the record, of four trees"
    more = survival_of(MESH, cut_along("data", "fsdp"), copies=2)
    assert more.wire_bytes == 2 * found.wire_bytes
    without = survival_of(MESH, cut_along("data", "fsdp"), copies=0)
    assert (without.survived_domains, without.survived_pairs) == (0, 0)
    assert (without.none.copied_bytes, without.wire_bytes) == (0, 0)


def test_cuts_within_a_domain_and_replicas_between_them_survive_each_domain():
    found = survival_of(MESH, cut_along("fsdp"), domains=4)
    assert (found.none.leaf_count, found.partial.leaf_count) == (0, 0)
    assert found.survived_domains == 4
    assert found.survived_pairs == 6 - 2
    more = survival_of(MESH, cut_along("fsdp"), domains=4, copies=2)
    assert (more.survived_domains, more.survived_pairs) == (4, 6)
    # The other way round replicas are lost together.
    found = survival_of(MESH, cut_along("data"), domains=4)
    assert found.survived_domains == 4
    assert found.none.leaf_count > found.full.leaf_count
    assert found.wire_bytes == found.none.leaf_bytes / 4


def test_one_leaf_of_one_domain_alone_is_sent():
    found = survival_of(MESH, {"experts": ((("data", "fsdp"),))})
    state, recorder = state_of(MESH, {})
    all_bytes = redundancy_report(state, recorder).base_bytes
    assert found.none.leaf_bytes == 4 * 4 * math.prod(SHAPES["experts"])  # and its moments, record
    assert found.full.leaf_bytes == all_bytes - found.none.leaf_bytes
    assert found.wire_bytes == found.none.leaf_bytes / 4
    assert found.survived_domains == 16


def test_a_leaf_may_be_held_elsewhere_in_part():
    # Three pairs of processes have the same each, and the second pair is in both domains.
    mesh = AbstractMesh((3, 2), ("fsdp", "data"))
    found = survival_of(mesh, {"embedding": ("fsdp",)}, domains=2)
    assert found.partial.leaf_count == 4  # the param, its moments and its record
    assert found.partial.copied_bytes == found.partial.leaf_bytes
    assert found.wire_bytes == found.partial.leaf_bytes / 4 * 2 / 3
    assert found.survived_domains == 2


def test_without_a_recorder_or_an_elementwise_update_memory_keeps_nothing():
    state, _ = state_of(MESH, {})
    assert redundancy_report(state).survival is None
    recorder = adacheck.Recorder(optax.contrib.muon(1e-3))
    params = state["params"]
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, P())),
        {"params": params, "opt_state": jax.eval_shape(recorder.init, params)},
    )
    found = redundancy_report(state, recorder, devices_per_process=1).survival
    assert isinstance(found, Survival)
    assert "come out of dot_general" in found.problem
    assert found.process_bytes == 0


@pytest.mark.parametrize("wrong", [{"copies": -1}, {"domains": 0}, {"domains": 17}])
def test_numbers_that_cannot_be_are_errors(wrong):
    with pytest.raises(ValueError, match="expected"):
        survival_of(MESH, {}, **wrong)


SPECS = st.sampled_from([None, "data", "fsdp", ("data", "fsdp"), ("fsdp", "data")])


@given(
    st.fixed_dictionaries({name: st.tuples(SPECS) for name in SHAPES}),
    st.integers(1, 8),
    st.integers(0, 2),
)
def test_a_recovery_finds_all_leaves_after_just_the_losses_that_were_foreseen(specs, count, copies):
    mesh = AbstractMesh((2, 4), ("data", "fsdp"))
    state, recorder = state_of(mesh, specs)
    report = redundancy_report(
        state, recorder, devices_per_process=1, domains=count, copies=copies
    ).survival
    assert report is not None
    assert report.problem == ""
    named, _ = trees.flatten(state)
    structure = structure_of(named, bind_all(recorders_of(recorder), leaf_types(named), None), 8, 1)
    pieces = ExportedUpdates("auto", exports=False).of(structure).pieces
    assert pieces is not None
    domains = [f"{n * count // 8}" for n in range(8)]
    parts = holdings.parts_of(structure, pieces, domains, copies)
    numbers = holdings.number_holders(structure, pieces, 8)
    held = [holdings.held_by(n, structure, parts, numbers) for n in range(8)]
    sizes = [math.prod(leaf.shape) for leaf in structure.leaves]

    def is_survived(lost):
        """As a recovery looks at it, from the files that are left."""
        offers = [
            agreement.Offer("run", n, 8, held[n], (agreement.OfferedStep(1, None, ()),))
            for n in range(8)
            if domains[n] not in lost
        ]
        left = frozenset().union(*(x.boxes(x.steps[0]) for x in offers))
        return not agreement.missing_leaves(left, sizes)

    names = sorted({*domains})
    assert report.survived_domains == sum(is_survived({name}) for name in names)
    pairs = itertools.combinations(names, 2)
    assert report.survived_pairs == sum(is_survived({*pair}) for pair in pairs)


@given(st.sampled_from([(8,), (4, 2), (2, 1, 4)]), st.data())
def test_a_planned_sharding_has_the_boxes_of_a_real_one(mesh_shape, data):
    names = NAMES[: len(mesh_shape)]
    spec, shape = data.draw(placements(mesh_shape))
    kinds = (AxisType.Explicit,) * len(mesh_shape)
    mesh = jax.make_mesh(mesh_shape, names, axis_types=kinds)
    real = NamedSharding(mesh, spec).devices_indices_map(shape)
    planned = PlannedSharding(NamedSharding(AbstractMesh(mesh_shape, names), spec), 3)
    found = planned.devices_indices_map(shape)
    assert [*found] == [PlannedDevice(n, n // 3) for n in range(8)]

    def bounds(index):
        return [s.indices(n) for s, n in zip(index, shape, strict=True)]

    at = [bounds(real[device]) for device in mesh.devices.flat]
    assert [bounds(each) for each in found.values()] == at


@pytest.mark.parametrize("make", [support.dict_run, support.nnx_run])
def test_a_planned_structure_is_that_of_a_save(make):
    run = make(support.mesh_of((4, 2)))
    recorders = recorders_of(run.recorder)
    real = Snapshots(recorders, None).take(run.state).structure
    mesh = AbstractMesh((4, 2), support.mesh_of((4, 2)).axis_names)

    def planned(leaf):
        where = NamedSharding(mesh, leaf.sharding.spec) if np.ndim(leaf) else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    named, _ = trees.flatten(jax.tree.map(planned, run.state))
    found = structure_of(named, bind_all(recorders, leaf_types(named), None), 1, 8)
    for name in ("leaves", "layouts", "index", "everywhere", "touched"):
        assert getattr(found, name) == getattr(real, name), name
    assert found.sites is not None
    assert real.sites is not None
    assert found.sites.uncovered == real.sites.uncovered == frozenset()
    assert found.sites.sizes.keys() == real.sites.sizes.keys()


@pytest.mark.parametrize("specs", [("x", "y"), ("x", None), (None, None), ("x", ("x", "y"))])
def test_leaves_of_one_shape_that_lie_otherwise_are_not_covered(specs):
    """As the samples of a real state know it."""
    mesh = support.mesh_of((4, 2))
    x, y = mesh.axis_names
    named = {None: P(), "x": P(x), "y": P(y), ("x", "y"): P((x, y))}
    arrays = [
        jax.device_put(np.zeros((16, 3), np.float32), NamedSharding(mesh, named[spec]))
        for spec in specs
    ]
    planned = [PlannedArray((16, 3), np.dtype("f4"), each.sharding) for each in arrays]
    found = PlannedSites(range(2), planned)
    assert found.uncovered == Sites(range(2), arrays).uncovered
    assert bool(found.uncovered) == (specs == ("x", "y"))
