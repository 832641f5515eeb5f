"""Finds the names behind the pseudonyms of the audit log."""

from collections.abc import Iterable, Mapping, Set

from serve_app.domain.audit import operator
from serve_app.service.resources import Resources


async def log_names(resources: Resources, logs: Set[str] | None = None) -> Mapping[str, str]:
    """Return the names of accounts and operators by their logs' pseudonyms; deleted ones have none.

    They are those of `logs`, or all.
    """
    operators = [operator(each.name) for each in await resources.operators.list()]
    accounts = _wanted(resources, await resources.accounts.ids(), logs)
    names = await resources.operator_reader.account_names(accounts.values())
    found = {log: names[account_id] for log, account_id in accounts.items() if account_id in names}
    return {**_wanted(resources, operators, logs), **found}


def _wanted(resources: Resources, ids: Iterable[str], logs: Set[str] | None) -> Mapping[str, str]:
    by_log = {resources.audit.pseudonym(each): each for each in ids}
    return by_log if logs is None else {log: each for log, each in by_log.items() if log in logs}
