"""The words of the house: requests, jobs, accounts, the catalog, errors. Standard library only."""
