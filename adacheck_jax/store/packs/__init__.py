"""Packs: one process's boxes of a delta, as zarr3 byte arrays in one OCDBT database.

All boxes go into two arrays, since tensorstore's cost (and stock Orbax's) is per array, not per
byte: one of bytes as they are, and one that is compressed. The deltas of deferred steps, which are
saved at once, lie one after another in them, each in a *section* of its own. Runs of zeros (experts
that got no token, rows of an embedding that saw no gradient) are left out, and declared in the
manifest. Every chunk has a crc32c.

Begin with :mod:`~adacheck_jax.store.packs.arrays`, the two arrays that every pack has.
"""
