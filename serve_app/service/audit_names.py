"""Names for the logs of the audit log, which hold pseudonyms."""

from collections.abc import Mapping

from serve_app.domain.audit import operator
from serve_app.service.resources import Resources


async def log_names(resources: Resources) -> Mapping[str, str]:
    """The names of all accounts and operators, by the pseudonyms of their logs; those that were deleted have none."""
    pseudonym = resources.audit.pseudonym
    accounts = {pseudonym(account.id): account.name for account in await resources.accounts.list()}
    operators = {pseudonym(operator(each.name)): operator(each.name) for each in await resources.operators.list()}
    return {**operators, **accounts}
