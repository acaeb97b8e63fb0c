"""Elements of any data type arrive with their bits."""

from __future__ import annotations

import pytest

from tests.processes import launch


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_bits_arrive_as_they_were(tmp_path, devices):
    launch("", 3, tmp_path, tmp_path / "out", devices, worker="tests.device.sending_worker")
