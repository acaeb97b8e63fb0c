"""Pages of reports that no training makes quickly: very many steps, and every kind of trouble."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from adacheck_jax.tools.report.changes import MOST_COLUMNS, MOST_LEAVES
from adacheck_jax.tools.report.facts import (
    Changes,
    LeafBytes,
    Report,
    Savings,
    StepFacts,
    Verification,
    Ways,
)

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def many_steps(count: int = 10_000, leaf_count: int = 300) -> Report:
    """A run of many steps: bases, deltas, deferred steps, and some of each kind of trouble."""
    steps = tuple(_step(n) for n in range(count))
    names = [f"params/layer_{n // 6}/block/kernel_{n % 6}" for n in range(leaf_count)]
    size = 1 << 20
    leaves = tuple(
        LeafBytes(
            name,
            "float32[512, 512]",
            ("params", "optimizer state", "record")[n % 3],
            size,
            Ways(replayed=size * count * 9 // 10, stored=size * count // 10),
        )
        for n, name in enumerate(names)
    )
    shown = names[:MOST_LEAVES]
    columns = tuple(
        (n * count // MOST_COLUMNS, (n + 1) * count // MOST_COLUMNS - 1)
        for n in range(MOST_COLUMNS)
    )
    train_state = Ways(replayed=200 * size * count * 9 // 10, stored=200 * size * count // 10)
    return Report(
        root="/checkpoints/large",
        made_at="2026-03-02T00:00:00+00:00",
        version="0.1.0",
        disk_bytes=40 * size * count,
        saved_count=count,
        recorded_count=count,
        newest=count - 1,
        leaf_count=leaf_count,
        update="replayed, exact on every mesh",
        steps=steps,
        savings=Savings(
            step_count=count,
            train_state_bytes=200 * size,
            full_bytes=200 * size * count,
            train_state=train_state,
            added=Ways(recorded=100 * size * count),
            zero_bytes=0,
            disk_bytes=40 * size * count,
            base_bytes=10 * size * count,
            delta_bytes=30 * size * count,
        ),
        leaves=leaves,
        changes=Changes(
            paths=tuple(shown),
            roles=tuple(leaf.role for leaf in leaves[:MOST_LEAVES]),
            left_out=leaf_count - len(shown),
            columns=columns,
            shares=tuple(
                tuple(0.5 + 0.5 * math.sin(k / 9 + n) for k in range(MOST_COLUMNS))
                for n in range(len(shown))
            ),
        ),
        restored_count=0,
        norms_note="Norms were not computed.",
        verification=Verification(0, 3, ("files of many steps",), {"full": count}, ()),
    )


def _step(n: int) -> StepFacts:
    kind = "base" if n % 25 == 0 else "deferred" if n % 5 in (1, 2) else "delta"
    kind = {5003: "damaged", 5004: "stock", 7004: "foreign"}.get(n, kind)
    is_saved = kind in ("base", "delta")
    wave = math.sin(n / 300)
    gradient = 1 + 0.5 * wave + 0.2 * math.sin(n * 1.7)
    return StepFacts(
        step=n,
        kind=kind,
        item=f"{n}/default" if kind != "deferred" else None,
        held_by=n + 2 if kind == "deferred" else None,
        saved_at=(BEGIN + timedelta(seconds=8 * n)).isoformat() if is_saved else None,
        waited_s=8 + wave if is_saved else None,
        metrics={"loss": 2 + 4 * math.exp(-n / 2000) + 0.1 * math.sin(n * 2.3)},
        depth=n % 25,
        checked="full",
        new_bytes=(50_000_000 if kind == "base" else 8_000_000 + n * 31) if is_saved else None,
        size_bytes=60_000_000 + n if is_saved else None,
        changed_count=290,
        gradient_norm=math.nan if 6100 <= n < 6104 else gradient,
        update_norm=0.01 * gradient,
        params_norm=58 + n / 1e4,
        learning_rate=0.004 * (0.5 + 0.5 * math.cos(n / 3200)),
        error="expected the bits that were saved, found others" if kind == "damaged" else None,
    )
