"""Marks pictures as made by a model, in ways that machines read, and reads such marks. It knows nothing of jobs."""
