"""Published weights: versions of a training's params, and those who follow them.

A publisher writes which bits changed; followers verify and place them on meshes of their own. Knows
no checkpoint and no optimizer. Begin with :mod:`~adacheck_jax.publish.publisher` and
:mod:`~adacheck_jax.publish.follower`; the form on storage is in docs/design/publish.md.
"""

from typing import TYPE_CHECKING

from adacheck_jax import lazy

if TYPE_CHECKING:  # for type checkers and editors; must name what follows
    from adacheck_jax.publish.follower import Follower
    from adacheck_jax.publish.publisher import Publisher

__all__ = ["Follower", "Publisher"]
__getattr__, __dir__ = lazy.names_of(__name__, {"follower": "Follower", "publisher": "Publisher"})
