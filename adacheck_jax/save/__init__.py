"""One save: snapshot, plan, copies to the host, write, exchange, commit.

Decides between base and delta, checks every delta against the state, and writes the manifest
last. Knows the rooms of data, devices and updates, and no Orbax. Begin with
:mod:`~adacheck_jax.save.saver`, which calls the stages.
"""
