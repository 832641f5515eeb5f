"""The roof: the only floor that knows Ray."""
