"""Ray Serve deployments and `atelier up`: the only layer that imports Ray."""
