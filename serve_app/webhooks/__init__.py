"""Webhooks: the endpoints of accounts, the addresses they may have, and the delivery of what is written for them."""
