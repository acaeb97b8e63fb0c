"""How much saving and restoring cost, beside other ways of doing it."""
