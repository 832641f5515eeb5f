"""The console: the web pages of an account, rendered on the server, which work without JavaScript.

The site mounts it at `/console`.
"""

from fastapi import FastAPI

from serve_app.web.console import history, keys, loras, playground, settings, usage, verify
from serve_app.web.console.pages import CUSTOMERS
from serve_app.web.site.sign_in import pages_app


def console_app() -> FastAPI:
    """Build the console's application."""
    others = (settings, keys, playground, history, loras, usage, verify)
    # the address of the keys pages is /settings/{slug}: the other settings come before them
    return pages_app(CUSTOMERS, [page.router for page in others])
