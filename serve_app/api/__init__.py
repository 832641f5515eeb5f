"""HTTP with FastAPI: interfaces A and B, jobs, console, documents, image files, health and metrics."""
