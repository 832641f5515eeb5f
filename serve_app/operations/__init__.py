"""What operators need: housekeeping, metrics, checks, reports and the deletion of accounts."""
