"""Runs the checks that a process of the service can make while it serves."""

import asyncio

from serve_app.service.doctor.checks import Check
from serve_app.service.doctor.machine import check_data_directory, check_disks, check_privacy, check_versions
from serve_app.service.doctor.stores import check_catalog, check_redis, check_secrets, check_storage
from serve_app.settings import Settings


async def check_service(settings: Settings) -> list[Check]:
    """Check all but the workers' machines and the weights of LoRAs; takes a few seconds."""

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
        *await check_catalog(settings, limit=0),
    ]
