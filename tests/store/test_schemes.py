"""The table of object stores: what each entry promises."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError, is_refusal
from adacheck_jax.schemes import SCHEMES

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_store_is_served_to_tests_and_told_to_users(name):
    from tests import object_stores

    assert {*EXTRAS[name]} <= {*EXTRAS["dev"]}, "developers have every client"
    assert name in object_stores.SERVERS
    guide = (ROOT / "docs/guide/clusters.md").read_text()
    for told in (f"| `{name}://` |", f"`{SCHEMES[name].endpoint}`"):
        assert told in guide, f"docs/guide/clusters.md, credentials: tell of {told}"
    for package in SCHEMES[name].raises:  # of classes of their own
        error = type("ClientError", (Exception,), {"__module__": f"{package}.errors"})
        assert is_refusal(error())


@pytest.mark.parametrize("name", SCHEMES)
def test_a_store_whose_client_is_missing_names_the_extra_that_has_it(name, monkeypatch):
    client = SCHEMES[name].client
    (requirement,) = EXTRAS[name]
    assert requirement.startswith(f"{client}>=")
    monkeypatch.setitem(sys.modules, client, None)
    told = rf"the package {client}, .* install adacheck-jax\[{name}\]"
    for made in (adacheck.checkpoint_manager, adacheck.v1.checkpointer):
        with pytest.raises(StorageError, match=told):
            made(f"{name}://bucket/run")
