"""The recipe of the pocket model: scenes, captions, training, checks and report.

Start it with `python -m models.pocket.recipe`.
"""
