"""The forms of a block of elements in a pack: as they are, planes of bytes, or a code.

Each is found in the bits alone, and gives back every one of them. Begin with
:mod:`~adacheck_jax.format.encodings.table`, which all layouts, writers and readers ask. Codes and
sets of positions are those of published weights, too.
"""
