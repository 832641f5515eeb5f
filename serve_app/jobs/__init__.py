"""Jobs: how they are accepted, queued, claimed, polled, kept and deleted, and their images."""
