"""Every delta is proved in full by a copy of the state in host memory that follows training."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import ReplayError
from adacheck_jax.memory import free_memory, shadow
from adacheck_jax.update.elements.host_fold import HostFold
from tests import support
from tests.save.loop import Loop, checked
from tests.support import mesh_of

KERNEL = "params/in/kernel"


def test_a_resumed_run_is_followed_from_the_step_that_was_restored(tmp_path):
    loop = Loop(tmp_path, support.dict_run(mesh_of((4, 2))))
    loop.save(2)
    loop.reopen()
    loop.save(2)
    assert loop.check() == "BRRR"
    assert checked(tmp_path) == ["full"] * 3


def test_one_element_changed_by_hand_is_refused_and_the_leaf_is_stored_from_then_on(tmp_path):
    """A sample takes one element of eight here: nothing but the shadow sees all of these."""
    loop, lost = Loop(tmp_path), []
    for step in range(1, 13):
        loop.train()
        if step >= 4:
            loop.edit(KERNEL, lambda x, step=step: x.at[step, 2 * step].add(1e-3))
        loop.put()
        try:
            loop.manager.wait_until_finished()
        except ReplayError as error:
            lost.append(str(error))
            loop.forget()
    assert len(lost) <= 1
    assert all(KERNEL in each for each in lost)
    loop.check()
    assert all(KERNEL in loop.unreplayed(step) for step in loop.deltas if step > 5)
    assert checked(tmp_path)[-1] == "full"


@pytest.mark.parametrize("shadow", [adacheck.Shadow(bytes=1000), None])
def test_without_room_for_it_a_sample_is_compared(tmp_path, shadow, caplog):
    with caplog.at_level(logging.INFO), Loop(tmp_path, shadow=shadow) as loop:
        loop.save(3)
    assert checked(tmp_path) == ["sample"] * 2
    told = [r for r in caplog.records if "Shadow(bytes=" in r.getMessage()]
    assert len(told) == (shadow is not None)


def test_a_shadow_that_fails_costs_no_step(tmp_path, monkeypatch, caplog):
    def fails(self, updates, **_):
        raise MemoryError("no memory")

    loop = Loop(tmp_path, max_deltas=3)
    loop.save(2)
    with monkeypatch.context() as patch:
        patch.setattr(HostFold, "advance", fails)
        loop.save(2)
    loop.save(2)
    assert loop.check() == "BRRRBR"
    assert checked(tmp_path) == ["full", "sample", "sample", "full"]
    assert [r for r in caplog.records if "no memory" in r.getMessage()]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_on_other_platforms_a_difference_may_be_the_arithmetic_of_the_host(platform, monkeypatch):
    monkeypatch.setattr(shadow.update_program, "platform", lambda: platform)
    assert shadow.Proof(shadow.ShadowThread(None), object(), lambda _: Future()).is_trusted() is (
        platform == "cpu"
    )


def test_free_memory_is_a_number_of_bytes():
    assert 2**20 < free_memory.free_bytes() < 2**50


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        ("0::/", {"": ("max", 7, 0)}, None),
        ("0::/", {"": (2000, 1500, 0)}, 500),
        ("0::/job/step", {"job": (2000, 1500, 0), "job/step": ("max", 1500, 0)}, 500),
        ("0::/job", {"job": (8000, 7900, 5900)}, 6000),
        ("0::/job", {"job": (2000, 2500, 0)}, 0),
        ("4:memory:/job", {"memory/job": (2000, 1500, 400), "memory": (2**60, 9, 0)}, 900),
        ("4:cpu,memory:/on/the/host", {"memory": (2000, 1500, 0)}, 500),
        ("3:cpuset:/job", {"": (2000, 1500, 0)}, None),
    ],
)
def test_free_memory_heeds_the_limits_of_control_groups(line, files, free, tmp_path, monkeypatch):
    for name, (limit, taken, cached) in files.items():
        names = free_memory._MEMORY["memory" if name.startswith("memory") else ""]
        (group := tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file, value in zip(names, (limit, taken), strict=False):
            (group / file).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")
    read = free_memory._read
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        free_memory, "_read", lambda x: [line] if x == "/proc/self/cgroup" else read(x)
    )
    found = free_memory.free_bytes()
    assert found == free if free is not None else found > 2**20


def test_free_memory_heeds_a_limit_of_addresses(monkeypatch):
    taken = free_memory._number("/proc/self/status", "VmSize:") << 10
    monkeypatch.setattr(
        free_memory.resource,
        "getrlimit",
        lambda _: (taken + 2**28, free_memory.resource.RLIM_INFINITY),
    )
    assert 0 < free_memory.free_bytes() <= 2**28 + 2**27
