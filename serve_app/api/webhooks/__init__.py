"""The webhooks of an account, a part of the jobs API."""
