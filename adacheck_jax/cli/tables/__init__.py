"""Tables and sentences for people: the output of the commands without ``--json``."""
