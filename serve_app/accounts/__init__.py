"""Accounts, users and API keys: how they sign in and authenticate, what they did and what they used."""
