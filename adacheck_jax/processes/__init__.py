"""The processes of a run: all that they tell each other, through JAX's coordination service.

One message (:mod:`~adacheck_jax.processes.messages`), one place for signs of life and time-outs
(:mod:`~adacheck_jax.processes.service`), and one way to meet
(:mod:`~adacheck_jax.processes.meetings`): each process posts a report, process 0 judges those of
all, and posts its answer. So a meeting costs each process one value written and one read, however
many they are. No collective is used: background threads wait here, while the main thread trains.

The first error about a matter is that of all, and whoever waits raises it. Else a wait ends by the
silence of a process that is gone, by a bound of time (:mod:`~adacheck_jax.processes.waiting`), or
by another call of a process that had to make the same (:mod:`~adacheck_jax.processes.calls`). On
that stand the conversations: saves and recoveries, restores
(:mod:`~adacheck_jax.processes.attempts`), calls of a manager
(:mod:`~adacheck_jax.processes.lockstep`), steps in memory (:mod:`~adacheck_jax.processes.gate`) and
collectives (:mod:`~adacheck_jax.processes.consent`). A process alone waits for nobody.

Begin with :mod:`~adacheck_jax.processes.meetings`.
"""
