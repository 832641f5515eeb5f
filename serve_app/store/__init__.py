"""What stores stand on: Redis client, embedded server, scripts, key map, measures and storage."""
