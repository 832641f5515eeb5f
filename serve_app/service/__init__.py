"""What the house does, one verb a file: submit, work, reap."""
