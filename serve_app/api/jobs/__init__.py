"""The room that shows a job as it is: what goes beyond both documents, with either credential, on paths neither uses."""

from serve_app.api.jobs.room import JobsRoom

__all__ = ["JobsRoom"]
