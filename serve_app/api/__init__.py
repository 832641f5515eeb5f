"""The doors: two public contracts, their superset, image files, and what operators ask for, all over HTTP."""
