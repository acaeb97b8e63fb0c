"""Ready-made rules: layers in a loop, and layers in a scan, of flax.linen and flax.nnx."""

from __future__ import annotations

from adacheck_jax.layout.rules import Rule, stack, unstack


def scan_layers(unrolled: str, scanned: str, *, axis: int = 0) -> list[Rule]:
    """From layers in a Python loop to ``nn.scan`` (linen), or ``nnx.scan`` over one module.

    Args:
        unrolled: path of a layer among the params, with ``{i}`` for its number: ``"Block_{i}"`` in
            linen, ``"layers/{i}"`` for a list of nnx.
        scanned: path of the scanned module: ``"ScanBlock_0"``, ``"layers"``.
        axis: ``variable_axes={"params": axis}`` of the scan.

    Example:
        ``RestoreArgs(state, rules=layout.scan_layers("Block_{i}", "ScanBlock_0"))``
    """
    return [stack(f"{unrolled}/{{rest...}}", f"{scanned}/{{rest...}}", over="i", axis=axis)]


def unroll_layers(scanned: str, unrolled: str, *, axis: int = 0) -> list[Rule]:
    """From a scan over layers to layers in a Python loop: the inverse of :func:`scan_layers`.

    Args:
        scanned: path of the scanned module among the params.
        unrolled: path of a layer, with ``{i}`` for its number.
        axis: ``variable_axes={"params": axis}`` of the scan.
    """
    return [unstack(f"{scanned}/{{rest...}}", f"{unrolled}/{{rest...}}", over="i", axis=axis)]
