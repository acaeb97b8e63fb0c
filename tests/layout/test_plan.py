"""Rules find the leaves that they concern, in every tree, and tell what does not fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax import layout
from adacheck_jax.errors import FormatError, MismatchError
from adacheck_jax.layout.operations import Kind
from adacheck_jax.layout.plan import Params, params_of, plan
from adacheck_jax.layout.rules import Pattern

PATHS = ("block_0/w", "block_1/w", "head")


def state(paths=PATHS, places=("params", "opt/mu", "opt/nu"), shape=(2, 3)):
    leaves = {f"{place}/{path}": Kind(shape, "float32") for place in places for path in paths}
    return {**leaves, "opt/count": Kind((), "int32")}


def params(paths=PATHS):
    return [Params("params", frozenset(paths))]


def test_a_rule_is_applied_to_the_params_and_to_all_that_is_kept_for_them():
    leaves = state() | {"ema/head": Kind((2, 3), "float32")}  # a masked tree has some of them
    found = plan([layout.rename("head", "tail")], leaves, params())
    assert {*found.trees} == {"params", "opt/mu", "opt/nu", "ema"}
    assert "ema/tail" in found.after
    rules = [
        *layout.scan_layers("block_{i}", "blocks"),
        layout.cast("head", "bfloat16", trees=["params"]),
    ]
    found = plan(rules, state(), params())
    for place in found.trees:
        assert found.after[f"{place}/blocks/w"] == Kind((2, 2, 3), "float32")
    assert found.after["params/head"].dtype == "bfloat16"
    assert found.after["opt/mu/head"].dtype == "float32"
    assert found.untouched == ["opt/mu/head", "opt/nu/head", "opt/count"]


def test_a_tree_with_other_leaves_is_none_of_the_params():
    leaves = state() | {"stats/head": Kind((7,), "float32"), "other/head": Kind((2, 3), "float32")}
    leaves["other/more"] = Kind((), "float32")
    found = plan([layout.rename("head", "tail")], leaves, params())
    assert {"stats/head", "other/head", "other/more"} <= found.after.keys()


def test_whole_paths_begin_with_a_slash():
    leaves = state() | {f"stats/block_{k}/mean": Kind((3,), "float32") for k in range(2)}
    rules = [layout.stack("/stats/block_{i}/{rest...}", "/stats/blocks/{rest...}")]
    assert plan(rules, leaves, params()).after["stats/blocks/mean"] == Kind((2, 3), "float32")


def test_names_can_be_exchanged():
    found = plan(
        [layout.rename("a/{x}", "b/{x}"), layout.rename("b/{x}", "c/{x}")],
        {"params/a/w": Kind((1,), "int8")},
        params(("a/w",)),
    )
    assert [*found.outputs] == ["params/c/w"]
    swap = [layout.rename("{kind}_{n}", "{n}_{kind}")]
    found = plan(swap, {"params/a_b": Kind((1,), "int8")}, params(("a_b",)))
    assert [*found.after] == ["params/b_a"]


def test_what_is_not_wanted_is_not_taken():
    rules = [
        *layout.scan_layers("block_{i}", "blocks"),
        layout.split("head", ["left", "right"], sizes=[1, 2], axis=1),
    ]
    found = plan(rules, state(), params()).needed_for(["params/right"])
    assert [*found.inputs] == ["params/head"]
    assert len(found.steps) == 1


TWO = {"params/a": Kind((6, 4), "int8"), "params/b": Kind((4,), "int8")}
GAP = ("block_0/w", "block_2/w")
SCANNED = layout.scan_layers("block_{i}", "blocks")
MASKED = {path: kind for path, kind in state().items() if path != "opt/mu/block_1/w"}
FACTORED = state() | {"opt/mu/head": Kind((2,), "float32")}

DO_NOT_FIT = [
    ([layout.rename("had", "x")], "found none. The leaves of params are: block_0/w"),
    ([layout.rename("block_0/w", "head")], "exist already: opt/mu/head"),
    ([layout.split("head", ["x", "x"], sizes=[1, 2])], "expected one leaf params/x, found two"),
    ([layout.stack("block_{i}/{n}", "{n}", axis=5)], r"rule 1 .*axis of 3, found axis 5"),
    ([layout.stack("{i}", "x")], "expected a number in head, found 'head'"),
    ([layout.fuse(["block_{i}/w", "block_{i}/b"], "x_{i}")], "expected a leaf block_0/b"),
    ([layout.strip("head", 5)], "at most 2"),
    ([layout.rename("head", "block_0")], "params/block_0 and params/block_0/"),
    ([layout.rename("block_0/w", "head/w")], "no leaf below another one"),
    ([layout.fuse(["head", "head"], "x")], "each leaf once, found one twice among params/head"),
    ([layout.cast("head", "int8", trees=["opt"])], "trees among params, opt/mu"),
    (SCANNED, "2 leaves in opt/mu, as in the params, found 1", MASKED),
    ([layout.transpose("head", [1, 0])], r"opt/mu/head: .*trees=", FACTORED),
    *(
        ([layout.fuse(["a", "b"], "c", axis=axis)], r"int8\[6, 4\] and int8\[4\]", TWO, ("a", "b"))
        for axis in (0, 1, -1)
    ),
    (SCANNED, "expected a leaf block_1/w beside block_0/w", state(GAP), GAP),
]


@pytest.mark.parametrize("case", DO_NOT_FIT, ids=lambda case: case[1])
def test_a_rule_that_does_not_fit_is_told(case):
    rules, told, leaves, paths = (*case, *(state(), PATHS)[len(case) - 2 :])
    with pytest.raises(MismatchError, match=told):
        plan(rules, leaves, params(paths))


def test_typed_keys_are_only_renamed():
    leaves = {"params/key": Kind((2,), "key<fry>")}
    assert "params/new" in plan([layout.rename("key", "new")], leaves, params(("key",))).after
    with pytest.raises(MismatchError, match="typed PRNG keys"):
        plan([layout.pad("key", 3)], leaves, params(("key",)))


def test_patterns_without_names_are_refused():
    for text in ("", "a/{", "{}", "{a b}", "{A}"):
        with pytest.raises(ValueError, match="braces enclose names"):
            Pattern(text)
    with pytest.raises(ValueError, match=r"expected the names \{i\} in 'x', found none"):
        layout.rename("block_{i}", "x")


SEGMENTS = st.lists(st.text("ab0.", min_size=1, max_size=3), min_size=1, max_size=3)


@given(SEGMENTS, SEGMENTS)
def test_a_pattern_that_matches_a_path_fills_in_to_that_path(first, rest):
    path = "/".join([*first, *rest])
    pattern = Pattern("{top}/{rest...}")
    values = pattern.match(path)
    assert (values is None) == ("/" not in path)
    if values is not None:
        assert pattern.fill(values) == path
        assert "/" not in values["top"]


@given(st.data())
def test_random_rules_are_undone_by_their_inverse(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(1, 3))
    paths = [f"b_{k}/{name}" for k in range(count) for name in ("q", "k")]
    leaves = {f"params/{path}": Kind((4, 6), "float32") for path in paths}
    possible = {
        "fuse": layout.fuse(["{b}/q", "{b}/k"], "{b}/qk", axis=1, groups=data.draw(GROUPS)),
        "stack": layout.stack("b_{i}/{n}", "b/{n}", axis=data.draw(st.integers(0, 2))),
        "pad": layout.pad("{all...}", 9, axis=-1 if count == 1 else -2),
        "rename": layout.rename("{top}/{n}", "{top}/x/{n}"),
    }
    names = data.draw(st.permutations(sorted(possible)))[: data.draw(st.integers(1, 4))]
    rules, fits = [], None
    for name in names:
        try:
            fits = plan([*rules, possible[name]], leaves, params(paths))
        except MismatchError:  # after a rule before it, this one finds nothing
            continue
        rules.append(possible[name])
    if fits is None:
        return
    fits = plan(rules, leaves, params(paths))
    values = {v: rng.random((4, 6), np.float32) for v in fits.inputs.values()}
    before = dict(values)
    for component in fits.components():
        for step in component.steps:
            results = step.operation.apply(np, [values[v] for v in step.taken])
            values |= zip(step.given, results, strict=True)
        back = dict(values)
        for step in fits.inverted(component):
            results = step.operation.apply(np, [back[v] for v in step.taken])
            back |= zip(step.given, results, strict=True)
        for value in component.taken:
            np.testing.assert_array_equal(back[value], before[value])


GROUPS = st.sampled_from([1, 2, 3])


def test_rules_are_read_from_a_file():
    text = """
        [[rule]]
        stack = "block_{i}/{rest...}"
        to = "blocks/{rest...}"

        [[rule]]
        split = "head"
        to = ["left", "right"]
        sizes = [1, 2]
        axis = 1
    """
    found = plan(layout.read_rules(text), state(), params())
    assert found.after["opt/mu/right"].shape == (2, 2)
    assert found.after["params/blocks/w"].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rule", "expected TOML"),
        ("", "expected tables"),
        ("[[rules]]\nrename = 'a'", "found rules"),
        ("[[rule]]\nto = 'a'", "rule 1: expected one of rename, stack"),
        ("[[rule]]\nrename = 'a'", "rule 1 .rename.: missing a required argument: 'to'"),
        ("[[rule]]\npad = 'a'\nsize = 3\nsizes = 4", "unexpected keyword argument 'sizes'"),
        ("[[rule]]\nrename = '{i}'\nto = 'a'", "expected the names {i}"),
        (
            "[[rule]]\npad = 'a'\nsize = 2.5",
            "pad.: expected an integer for size, found 2.5",
        ),
        ("[[rule]]\nrepeat = 'a'\ncount = '2'", "expected an integer for count, found '2'"),
        ("[[rule]]\ntranspose = 'a'\naxes = [1.0, 0.0]", "an integer for axes, found 1.0"),
        ("[[rule]]\nsplit = 'a'\nto = ['b', 'c']\nsizes = [1]", r"expected 2 sizes.*found \[1\]"),
        (b"[[rule]]\nrename = '\xe9'", "expected TOML, found what is not: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_wrong_is_told(text, told):
    with pytest.raises(FormatError, match=told):
        layout.read_rules(text, "rules.toml")


def test_the_root_of_the_params_is_told_by_their_gradients():
    paths = ["state/params/net/a/w", "state/params/net/b/w"]
    assert params_of(paths, ["net/a/w", "net/b/w"]).root == "state/params"
    assert params_of(paths, ["net/a/w"]).root == "state/params"
    assert params_of(["w"], ["w"]) == Params("", frozenset(["w"]))
    single = ["module/w", "module/bias"]  # at the top, whose name stays
    assert params_of(single, single).root == ""
    assert params_of(paths, []).root == "state/params/net"
