"""Draws the Grafana dashboard by its own queries, from a real Prometheus and a service under load."""
