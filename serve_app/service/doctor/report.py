"""Runs the checks that a process of the service can make while it serves."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from serve_app.service.doctor.checks import Check
from serve_app.service.doctor.machine import check_data_directory, check_disks, check_privacy, check_versions
from serve_app.service.doctor.stores import check_catalog, check_redis, check_secrets, check_storage
from serve_app.settings import Settings

MOST_WEIGHTS, WEIGHTS_WITHIN = 20, timedelta(seconds=10)
"""Files of LoRAs that are read for a report, and how long, so that a person can wait for it."""


async def check_service(settings: Settings, check_machines: Callable[[], list[Check]] | None = None) -> list[Check]:
    """Check this machine and the stores; and every machine of the deployment, where it can be asked."""

    def check_machine() -> list[Check]:
        return [
            *check_versions(),
            *check_data_directory(settings),
            *check_disks(settings),
            *check_privacy(settings),
            *check_secrets(settings),
            *check_redis(settings),
        ]

    return [
        *await asyncio.to_thread(check_machine),
        *await check_storage(settings),
        *await check_catalog(settings, limit=MOST_WEIGHTS, weights_within=WEIGHTS_WITHIN),
        *(await asyncio.to_thread(check_machines) if check_machines else []),
    ]
