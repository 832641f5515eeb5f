"""Use cases: submit, work, reap."""
