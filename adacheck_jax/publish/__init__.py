"""Published weights: versions of a training's params, and those who follow them.

A publisher writes which bits changed; followers verify and place them on meshes of their own. Knows
no checkpoint and no optimizer. Begin with :mod:`~adacheck_jax.publish.publisher` and
:mod:`~adacheck_jax.publish.follower`; the form on storage is in docs/design/publish.md.
"""
