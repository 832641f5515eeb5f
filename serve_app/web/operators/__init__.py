"""The operators' pages: the service's state, accounts, failed jobs, LoRAs and the audit log.

They work without JavaScript, and no session of a customer opens one. The site mounts them at `/operators`.
"""

from fastapi import FastAPI

from serve_app.web.operators import accounts, jobs, overview
from serve_app.web.operators.pages import OPERATORS
from serve_app.web.site.sign_in import pages_app


def operators_app() -> FastAPI:
    """Build the application of the operators' pages."""
    return pages_app(OPERATORS, [overview.router, accounts.router, jobs.router])
