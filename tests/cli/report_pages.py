"""Reports that no training makes quickly: very many steps, and every kind of trouble."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from adacheck_jax.tools.history.log import StepLog
from adacheck_jax.tools.listing import RootSummary, StepSummary
from adacheck_jax.tools.report.gather import LeafReport, Report

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
SIZE = 1 << 20


def many_steps(count: int = 10_000, leaf_count: int = 300) -> Report:
    """A run of many steps: bases, deltas, deferred steps, and some of each kind of trouble."""
    names = [f"params/layer_{n // 6}/block/kernel_{n % 6}" for n in range(leaf_count)]
    rows = tuple(_row(n) for n in range(count) if not _is_deferred(n))
    logs = tuple(_log(n) for n in range(count))
    return small(
        rows,
        root="/checkpoints/large",
        damage={row.item: row.error for row in rows if row.error},
        redundancy={"stored in bases": SIZE, "stored in deltas": 3 * SIZE, "replayed": 6 * SIZE},
        leaves=tuple(_leaf(name, k, count) for k, name in enumerate(names)),
        state_bytes=200 * SIZE,
        kept=tuple(range(count)),
        held={n: n + 2 for n in range(count) if _is_deferred(n)},
        checked={"full": count},
        logs=logs,
        norms_note="Norms of some steps.",
    )


def small(
    rows: tuple[StepSummary, ...] = (
        StepSummary(0, "0/default", "base"),
        StepSummary(1, "1/default", "delta"),
    ),
    root: str = "/tmp/run",
    **facts: Any,
) -> Report:
    """A report of a few rows, of which nothing else is known but the given facts."""
    damage = {row.item: row.error for row in rows if row.error}
    summary = RootSummary(root, 5, len(rows), len(damage), rows)
    return Report("2026-03-02T00:00:00+00:00", summary, None, **{"damage": damage, **facts})


def _leaf(name: str, k: int, count: int) -> LeafReport:
    changes = (1e-3 * (1.1 + math.sin(n / 900 + k)) if n else None for n in range(count))
    return LeafReport(name, SIZE, SIZE, 0, count - 1, tuple(changes))


def _is_deferred(n: int) -> bool:
    return n % 25 != 0 and n % 5 in (1, 2)


def _row(n: int) -> StepSummary:
    kind = {5004: "stock", 7004: "foreign"}.get(n, "base" if n % 25 == 0 else "delta")
    return StepSummary(
        n,
        f"{n}/default",
        kind,
        saved_at=(BEGIN + timedelta(seconds=8 * n)).isoformat(),
        metrics={"loss": 2 + 4 * math.exp(-n / 2000) + 0.1 * math.sin(n * 2.3)},
        depth=n % 25,
        checked="full",
        new_bytes=50_000_000 if kind == "base" else 8_000_000 + n * 31,
        size_bytes=60_000_000 + n,
        error="expected the bits that were saved, found others" if n == 5003 else None,
    )


def _log(n: int) -> StepLog:
    gradient = math.nan if 6100 <= n < 6104 else 1.5 + 0.5 * math.sin(n / 300) + math.sin(n * 1.7)
    rate = 0.004 * (0.5 + 0.5 * math.cos(n / 3200))
    return StepLog(n, "delta", gradient, 0.01 * gradient, 58 + n / 1e4, rate, {}, False)
