"""The table of object stores: what each entry promises."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.store.storage.schemes import SCHEMES

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


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
