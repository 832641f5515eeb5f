"""Requests, jobs, accounts, the catalog, errors. Standard library only."""
