"""Checks of everything the service depends on: `atelier doctor`, and the operators' page of checks."""
