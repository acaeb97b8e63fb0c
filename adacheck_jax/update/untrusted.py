"""Update programs from untrusted files: parsed in another process, and refused unless pure.

A crafted program can end the process that parses it, so :mod:`adacheck_jax.update.vet_program`
parses it first, in a process of its own. Programs that this process exported need no such test,
nor do those that parsed before on this machine: their digests are empty files in the user's cache
directory, where a resumed run finds them. A program that parses is run only if it does nothing but
compute. StableHLO can call any function that is registered in the process (Python callbacks are
such custom calls), read and write channels to the host, and more with every release; so operations
are allowed by name, and any other is refused.

Any thread may call. There is no lock: two threads that are the first to meet a program at worst
both have it parsed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax.export
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from adacheck_jax.errors import FormatError

_log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("vet_program.py")
_TIMEOUT_S = 60.0
_verdicts: dict[str, str] = {}
"""Reasons why programs cannot be parsed, by digest of their bytes; empty for good programs."""

_STABLEHLO = """
    abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil cholesky clamp compare
    complex composite concatenate constant convert convolution cosine count_leading_zeros
    divide dot_general dynamic_slice dynamic_update_slice exponential exponential_minus_one
    fft floor gather if imag iota is_finite log log_plus_one logistic map maximum minimum
    multiply negate not optimization_barrier or pad popcnt power real reduce
    reduce_precision reduce_window remainder reshape return reverse rng_bit_generator
    round_nearest_afz round_nearest_even rsqrt scatter select select_and_scatter shift_left
    shift_right_arithmetic shift_right_logical sign sine slice sort sqrt subtract tan tanh
    transpose triangular_solve while xor
"""
_COLLECTIVES = """
    all_gather all_reduce all_to_all collective_permute partition_id reduce_scatter
"""  # communication of an update inside shard_map
_SHARDY = "manual_computation mesh reshard return sharding_constraint sharding_group"
_CHLO = """
    acos acosh asin asinh atan atanh bessel_i1e broadcast_add broadcast_compare
    broadcast_select conj constant cosh digamma erf erf_inv erfc is_inf is_neg_inf
    is_pos_inf lgamma next_after polygamma ragged_dot sinh square tan top_k zeta
"""
OPERATIONS = frozenset(
    ["builtin.module", "func.func", "func.call", "func.return", "stablehlo.custom_call"]
    + [f"stablehlo.{name}" for name in (_STABLEHLO + _COLLECTIVES).split()]
    + [f"chlo.{name}" for name in _CHLO.split()]
    + [f"sdy.{name}" for name in _SHARDY.split()]
)
"""Names of the operations that an update may consist of."""

_ROUTINES = {
    "lapack": "geqrf gehrd gees geev gesdd getrf gtsv potrf trsm",
    "cusolver": "geqrf gesvd gesvdj getrf orgqr potrf syevd sytrd",
    "hipsolver": "geqrf gesdd gesvd gesvdj getrf orgqr potrf syevd",
}
CUSTOM_CALLS = frozenset(
    ["Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"]
    + ["Eigh", "Qr", "ProductOfElementaryHouseholderReflectors", "LuDecomposition", "ApproxTopK"]
    + ["cu_threefry2x32_ffi", "hip_threefry2x32_ffi", "cusparse_gtsv2_ffi"]
    + ["cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation"]
    + [f"lapack_{t}{name}_ffi" for t in "sdcz" for name in _ROUTINES["lapack"].split()]
    + [f"lapack_{t}{name}_ffi" for t in "sd" for name in ("orgqr", "syevd", "sytrd")]
    + [f"lapack_{t}{name}_ffi" for t in "cz" for name in ("ungqr", "heevd", "hetrd")]
    + [f"cusolver_{name}_ffi" for name in _ROUTINES["cusolver"].split()]
    + [f"hipsolver_{name}_ffi" for name in _ROUTINES["hipsolver"].split()]
)
"""Targets of custom calls that an update may make: linear algebra, random bits and shardings.

These are the pure ones among the targets that ``jax.export`` allows. Left out are kernels whose
code is part of the program (Pallas for TPU and GPU, Triton), TensorFlow functions, uninitialized
buffers, and placement in host memory.
"""


def trust(data: bytes) -> None:
    """Note a program that this process exported: it is not parsed in another process."""
    _verdicts[digest := digest_of(data)] = ""
    _remember(digest)


def check_parses(data: bytes, where: str) -> None:
    """Parse a program in another process, if that was not done before; waits for it.

    Raises:
        FormatError: the program ended the process that parsed it, or took too long.
    """
    digest = digest_of(data)
    if digest not in _verdicts:
        _verdicts[digest] = "" if _is_remembered(digest) else _verdict_of(data)
    if verdict := _verdicts[digest]:
        raise FormatError(
            f"{where}: expected a program that can be parsed, found one that {verdict}: it was "
            "made to do so, since its digest is the manifest's. Do not trust this checkpoint."
        )


def _mark_of(digest: str) -> Path:
    """A file that is there if a program parsed before, by this release of the parser."""
    top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return top / "adacheck_jax" / f"parsed-by-jaxlib-{metadata.version('jaxlib')}" / digest


def _is_remembered(digest: str) -> bool:
    try:
        return _mark_of(digest).is_file()
    except (OSError, RuntimeError):  # there is no home
        return False


def _remember(digest: str) -> None:
    try:
        mark = _mark_of(digest)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except (OSError, RuntimeError) as error:
        _log.debug("It is not remembered that an update program was parsed: %s", error)


def _verdict_of(data: bytes) -> str:
    try:
        module = jax.export.deserialize(bytearray(data)).mlir_module_serialized
    except Exception:  # raised in Python, and harmless: loading the program raises it again
        return ""
    verdict = _tried(module)
    if verdict == "":
        _remember(digest_of(data))
    return verdict or ""


def _tried(module: bytes) -> str | None:
    """The reason why a process cannot parse a program, or none; None if no process could try."""
    command = [sys.executable, "-P", str(_SCRIPT)]
    try:
        done = subprocess.run(
            command, input=module, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"takes the parser more than {_TIMEOUT_S:.0f} seconds"
    except OSError as error:  # no interpreter, or no further process
        _log.warning("An update program is parsed without a process of its own: %s", error)
        return None
    if done.returncode > 0:
        _log.warning(
            "An update program is parsed without a process of its own, which failed: %s",
            done.stderr.decode(errors="replace")[-500:],
        )
        return None
    return f"ends the parser by signal {-done.returncode}" if done.returncode < 0 else ""


def digest_of(program: bytes) -> str:
    """The digest by which a program is known."""
    return hashlib.sha256(program).hexdigest()


def check_operations(exported: jax.export.Exported, where: str) -> None:
    """Refuse a program that may do anything but compute.

    Raises:
        FormatError: names the operations that are not allowed.
    """
    effects = [*exported.ordered_effects, *exported.unordered_effects]
    if effects or exported.disabled_safety_checks:
        raise _refusal(where, [*map(str, effects), *map(str, exported.disabled_safety_checks)])
    foreign: dict[str, None] = {}

    def look(operation: ir.Operation) -> ir.WalkResult:
        if operation.name not in OPERATIONS:
            foreign[operation.name] = None
        elif operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target not in CUSTOM_CALLS:
                foreign[f"custom_call @{target}"] = None
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context() as context:
        module_of(exported, context).operation.walk(look)
    if foreign:
        raise _refusal(where, [*foreign])


def module_of(exported: jax.export.Exported, context: ir.Context) -> ir.Module:
    """The operations of a program, not by way of their text, which takes four times as long."""
    return stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)


def _refusal(where: str, found: list[str]) -> FormatError:
    shown = ", ".join(each[:100] for each in found[:5])
    return FormatError(
        f"{where}: expected an update that only computes, found {shown}: it is not run, since a "
        "file may come from anyone. Give AdaCheckHandler the Recorder that the optimizer was built "
        "with, which replays without the file, or restore a base step."
    )
