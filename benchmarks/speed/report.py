"""Results as Markdown tables and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.checks import SAMPLE
from benchmarks.speed.pinning import FREE, STAGES
from benchmarks.speed.ways import BASE, DELTA, DELTA_FILE, FLOOR, STATE_FILE, STOCK


def markdown(results: Mapping[str, Any]) -> str:
    """All tables, with the hardware, the versions and the command that they hold for."""
    about = results["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        f"`{about['command']}`: {about['cores']} cores ({about['machine']}), {versions}; seed 0. "
        "Medians; CPU is of all threads of the process, peak memory beyond what was in use before."
    ]
    for key, result in results.items():
        if key in _TABLES:
            title, shown = _TABLES[key]
            parts += [f"## {title}", shown(result)]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.2f}" if size_bytes < 1e7 else f"{size_bytes / 1e6:,.1f}"


def _saves(result: Mapping[str, Any]) -> str:
    costs = result["costs"]
    stock = costs[STOCK]
    rows = []
    for name, cost in costs.items():
        ratios = [cost[key] / stock[key] for key in ("blocking_s", "cpu_s", "new_bytes")]
        rows.append(
            [
                name,
                f"{_ms(cost['blocking_s'])} ({ratios[0]:.3f})",
                _ms(cost["durable_s"]),
                f"{_ms(cost['cpu_s'])} ({ratios[1]:.3f})",
                f"{_mb(cost['new_bytes'])} ({ratios[2]:.4f})",
                _mb(max(0, cost["peak_bytes"])),
            ]
        )
    head = ["save", "blocking ms (× stock)", "durable ms", "CPU ms (× stock)"]
    head += ["new MB (× stock)", "peak MB"]
    delta, floor = costs[DELTA], costs[FLOOR]
    blocking, durable = (
        delta["blocking_s"] / floor["blocking_s"],
        _durable(costs, DELTA, DELTA_FILE),
    )
    lines = [
        f"{result['leaves']} arrays with the record; {_mb(result['state_bytes'])} MB without it.",
        table(head, rows),
        f"A delta's blocking time is {blocking:.2f} × the manager's floor; it is durable after "
        f"{durable:.2f} × the time of writing its bytes into one file, a base after "
        f"{_durable(costs, BASE, STATE_FILE):.2f} ×.",
    ]
    return "\n\n".join(lines)


def _durable(costs: Mapping[str, Any], name: str, file: str) -> float:
    return costs[name]["durable_s"] / costs[file]["durable_s"]


def _restores(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        least_s = row["stock_s"] + row["read_s"] + row["updates_s"]
        rows.append(
            [
                str(row["deltas"]),
                _ms(row["restore_s"]),
                f"{_ms(least_s)} = {_ms(row['stock_s'])} + {_ms(row['read_s'])} + "
                f"{_ms(row['updates_s'])}",
                f"{row['restore_s'] / least_s:.2f}",
                _mb(max(0, row["peak_bytes"])),
            ]
        )
    head = ["deltas", "restore ms", "stock's restore + reading + bare updates, ms", "×", "peak MB"]
    return f"{_mb(result['state_bytes'])} MB with the record.\n\n" + table(head, rows)


def _training(result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    bare_s = next(iter(rows.values()))["step_s"]
    cells = [
        [
            name,
            _ms(row["step_s"]),
            f"{(row['step_s'] / bare_s - 1) * 100:.0f} %",
            _ms(row["longest_s"]),
        ]
        for name, row in rows.items()
    ]
    head = ["saved", "ms a step", "slower by", "longest step ms"]
    return f"{_mb(result['state_bytes'])} MB of state.\n\n" + table(head, cells)


def _recording(results: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for result in results:
        for name, row in result["rows"].items():
            times = ("blocking_s", "median_blocking_s", "step_s", "cpu_s")
            cells.append(
                [f"{_mb(result['state_bytes'])} MB", name, *(_ms(row[key]) for key in times)]
            )
    head = ["state", "kept, every step", "blocking ms (mean)", "blocking ms (median)"]
    head += ["ms a step", "CPU ms a step"]
    every = results[0]["every"]
    return f"{every} recorded steps are saved at once.\n\n" + table(head, cells)


def _pinning(results: Sequence[Mapping[str, Any]]) -> str:
    head = ["devices", "update", "trace, CPU s", "lower, CPU s", "compile, CPU s"]
    head += ["all three, CPU s", "ms a train step"]
    cells = []
    for result in results:
        free = _compiling_s(result["rows"][FREE]), result["rows"][FREE]["step_s"]
        for name, row in result["rows"].items():
            ratios = _compiling_s(row) / free[0], row["step_s"] / free[1]
            cells.append(
                [
                    str(result["devices"]),
                    name,
                    *(f"{row[stage]:.2f}" for stage in STAGES),
                    f"{_compiling_s(row):.2f} ({ratios[0]:.2f})",
                    f"{_ms(row['step_s'])} ({ratios[1]:.3f})",
                ]
            )
    return f"adamw on {results[0]['leaves']} arrays of 8 × 8.\n\n" + table(head, cells)


def _compiling_s(row: Mapping[str, float]) -> float:
    return sum(row[stage] for stage in STAGES)


def _longest(rows: Mapping[str, Mapping[str, Any]]) -> str:
    cells = [
        [name, _ms(row["mean_s"]), _ms(row["longest_s"]), f"{row['longest_s'] / row['mean_s']:.2f}"]
        for name, row in rows.items()
    ]
    first = next(iter(rows.values()))
    about = f"{_mb(first['state_bytes'])} MB of state; {first['arrays']} arrays with the record"
    head = ["saved", "mean step, ms", "longest step, ms", "longest ÷ mean"]
    return f"{about}.\n\n" + table(head, cells)


def _handover(result: Mapping[str, Any]) -> str:
    cells = [
        [
            f"{row['kind']}, {row['form']}",
            _mb(row["peak_bytes"]),
            f"{row['peak_bytes'] / result['leaf_bytes']:.1f}",
            f"{row['peak_bytes'] / result['state_bytes']:.2f}",
        ]
        for row in result["rows"]
    ]
    size = f"{_mb(result['state_bytes'])} MB of state"
    about = f"{size}; {result['leaves']} arrays of params, each of {_mb(result['leaf_bytes'])} MB"
    head = ["step, form", "peak MB", "÷ a leaf", "÷ the state"]
    return f"{about}; peaks beyond those of the same command on a tiny root.\n\n" + table(
        head, cells
    )


def _checks(results: Sequence[Mapping[str, Any]]) -> str:
    head = ["devices", "the step that is saved is", "delta", "blocking ms", "durable ms", "CPU ms"]
    cells = []
    for result in results:
        for kind, costs in result["costs"].items():
            for name, cost in costs.items():
                ratios = (cost[key] / costs[SAMPLE][key] for key in _GROWN)
                pairs = zip(_GROWN, ratios, strict=True)
                times = [f"{_ms(cost[key])} ({ratio:.2f})" for key, ratio in pairs]
                cells.append([str(result["devices"]), kind, name, *times])
    first = results[0]
    about = f"{first['leaves']} arrays with the record; {_mb(first['state_bytes'])} MB without it"
    return f"{about}; in parentheses against the check by sample.\n\n" + table(head, cells)


def _stores(results: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for result in results:
        cells = [
            [
                name,
                _ms(row["blocking_s"]),
                _ms(row["mean_blocking_s"]),
                _ms(row["durable_s"]),
                f"{row['own_requests']:.0f} of {row['requests']:.0f}",
                _mb(row["sent_bytes"]),
                _mb(row["received_bytes"]),
            ]
            for name, row in result["rows"].items()
        ]
        head = ["", "blocking ms", "mean", "durable ms", "requests", "MB sent", "MB received"]
        about = (
            f"{result['kind']}, each request {result['delay_ms']} ms longer; "
            f"{_mb(result['state_bytes'])} MB in {result['leaves']} arrays. Of the requests those "
            "for files of this library come first; the others are Orbax's."
        )
        parts += [about, table(head, cells)]
    return "\n\n".join(parts)


def _fingerprints(results: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for result in results:
        for name, row in result["rows"].items():
            times = [f"{_ms(each['median'])} ({each['ratio']:.2f})" for each in row.values()]
            cells.append([str(result["devices"]), name, *times])
    first = results[0]
    size = f"{first['leaves']} arrays, {_mb(first['state_bytes'])} MB"
    about = f"{size}; half of them whole on each device"
    head = ["devices", "fingerprints", "a delta durable, ms", "its CPU ms", "record_step, ms"]
    return f"{about}.\n\n" + table(head, cells)


_GROWN = ("blocking_s", "durable_s", "cpu_s")


def _growth(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        for name, cost in row["costs"].items():
            times = [_ms(cost[key]) for key in _GROWN]
            cells.append([row["of"], str(row["at"]), name, *times, _mb(cost["new_bytes"])])
    head = ["grows", "at", "save", "blocking ms", "durable ms", "CPU ms", "new MB"]
    return table(head, cells)


def _hosts(results: Sequence[Mapping[str, Any]]) -> str:
    saves, takes = list[list[str]](), list[list[str]]()
    keys = ("blocking_s", "cpu_s", "record_blocking_s", "record_cpu_s")
    for result in results:
        first = next(iter(result["saves"].values()))
        for name, cost in result["saves"].items():
            times = [f"{_ms(cost[key])} ({cost[key] / first[key]:.2f})" for key in keys]
            saves.append([str(result["parts"]), name, *times, f"{cost['sent']:.2f}"])
        takes.append([str(result["parts"]), *(f"{x:.2f}" for x in result["takes"].values())])
    state_bytes = next(iter(results[0]["saves"].values()))["state_bytes"]
    about = f"{_mb(state_bytes)} MB of state; blocking of the slowest process, CPU of all"
    head = ["parts", "kept", "blocking ms of a save", "CPU ms", "of a recorded step", "CPU ms"]
    tiers = ["parts", *(f"{name}, s" for name in results[0]["takes"])]
    return f"{about}.\n\n{table([*head, 'sent ÷ record'], saves)}\n\n{table(tiers, takes)}"


_TABLES: dict[str, tuple[str, Any]] = {
    "saves": ("One save", _saves),
    "large saves": ("One save of a large state", _saves),
    "restores": ("A restore", _restores),
    "training": ("Training", _training),
    "longest step": ("The longest step", _longest),
    "recording": ("Short steps, each kept", _recording),
    "pinning": ("Pinned updates beside unpinned ones", _pinning),
    "checks": ("Deltas that are checked", _checks),
    "fingerprints": ("Fingerprints and the comparison of replicas", _fingerprints),
    "handover": ("Memory of exports and transforms", _handover),
    "stores": ("Object stores", _stores),
    "growth": ("How the cost of a save grows", _growth),
    "processes": ("Several processes", _growth),
    "hosts": ("The memory of four hosts", _hosts),
}


def plots(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws the results; returns the pictures' paths."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for key in ("saves", "large saves"):
        if key in results:
            path = directory / f"{key.replace(' ', '_')}.png"
            drawn.append(_bars(results[key]["costs"], path))
    if "restores" in results:
        drawn.append(_restore_lines(results["restores"]["rows"], directory / "restores.png"))
    if "growth" in results:
        drawn.append(_growth_lines(results["growth"], directory / "growth.png"))
    return drawn


def _bars(costs: Mapping[str, Any], path: Path) -> Path:
    import matplotlib.pyplot as plt

    names = [*costs][::-1]
    figure, axes = plt.subplots(1, 4, figsize=(15, 0.35 * len(names) + 1.5), sharey=True)
    labels = ("blocking ms", "durable ms", "CPU ms", "new MB")
    for axis, key, label in zip(axes, (*_GROWN, "new_bytes"), labels, strict=True):
        scale = 1e-6 if key == "new_bytes" else 1e3
        values = [costs[name][key] * scale for name in names]
        colors = ["tab:blue" if n.startswith(("delta", "base")) else "silver" for n in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(label)
        axis.margins(x=0.25)
    return _saved(figure, path)


def _restore_lines(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    at = [row["deltas"] for row in rows]
    axis.plot(at, [row["restore_s"] for row in rows], "o-", label="restore")
    floor = [0.0] * len(rows)
    for key, label in (
        ("stock_s", "stock Orbax's restore"),
        ("updates_s", "bare updates"),
        ("read_s", "reading the deltas' bytes"),
    ):
        top = [a + row[key] for a, row in zip(floor, rows, strict=True)]
        axis.fill_between(at, floor, top, alpha=0.4, label=label)
        floor = top
    axis.set(xlabel="deltas replayed", ylabel="s", ylim=(0, None))
    axis.legend()
    return _saved(figure, path)


def _growth_lines(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    kinds = [*dict.fromkeys(row["of"] for row in rows)]
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 4), squeeze=False)
    names = dict.fromkeys(name for row in rows for name in row["costs"])
    colors = {name: f"C{position}" for position, name in enumerate(names)}
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = [row for row in rows if row["of"] == kind]
        for name in own[0]["costs"]:
            for key, style in (("blocking_s", "o-"), ("durable_s", "s--")):
                values = [row["costs"][name][key] * 1e3 for row in own]
                label = f"{name}, {key.removesuffix('_s')}"
                at = [row["at"] for row in own]
                axis.plot(at, values, style, label=label, color=colors[name])
        at = [row["at"] for row in own]
        if max(at) > 10 * max(1, min(at)):
            axis.set(xscale="log", yscale="log")
        else:
            axis.set_ylim(0, None)
        axis.set(xlabel=kind, ylabel="ms")
        axis.set_xticks(at, [str(each) for each in at])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path
