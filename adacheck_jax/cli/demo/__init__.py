"""A training script to copy, and the demonstration that `adacheck demo` runs with it."""
