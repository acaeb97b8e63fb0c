"""Tools: checkpoint roots inspected, verified and repaired without the run that wrote them.

A library: it prints nothing, :mod:`~adacheck_jax.cli` does. Knows no room in which saves are
planned, proved and made. Begin with :mod:`~adacheck_jax.tools.steps`.

Everywhere ``root`` is the directory or URL given to the checkpoint manager, or its steps where they
were read already; ``number`` a step's: None for the newest step, below zero a place counted from
it; ``item`` the name of an item's directory, needed where a step holds several; ``read_data`` True
to read every stored byte; ``dry_run`` True to look only; ``progress`` a callback before each step.
"""

from typing import TYPE_CHECKING

from adacheck_jax import lazy

if TYPE_CHECKING:  # for type checkers and editors; must name what follows
    from adacheck_jax.device.replicas import Divergence, ReplicaReport, replica_report
    from adacheck_jax.tools.handover.importing import import_state
    from adacheck_jax.tools.plan import RedundancyReport, redundancy_report

__all__ = [
    "Divergence",
    "RedundancyReport",
    "ReplicaReport",
    "import_state",
    "redundancy_report",
    "replica_report",
]
__getattr__, __dir__ = lazy.names_of(
    __name__,
    {
        ".device.replicas": "Divergence ReplicaReport replica_report",
        "handover.importing": "import_state",
        "plan": "RedundancyReport redundancy_report",
    },
)
