"""Plans of saves: pure functions of the caller's options and of facts about state and parent.

Base or delta (``decision``; by length ``when_base``), on which parent (``which_parent``), and what
is stored, kept and checked. Nothing here looks at a disk, or waits for a device. Begin with
:mod:`~adacheck_jax.plan.save_plan`.
"""
