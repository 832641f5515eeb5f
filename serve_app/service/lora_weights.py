"""Removes stored weights that no LoRA has, and keeps those that a registration is about to need."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from serve_app.domain.errors import StoreUnavailable
from serve_app.service.resources import Resources
from serve_app.stores.lora_files import LoraFiles

_log = logging.getLogger(__name__)

ASK_AGAIN_S, WAIT_S = 0.05, 60.0
"""How often and how long a registration asks while another process removes the same weights."""


@asynccontextmanager
async def held_weights(resources: Resources, uri: str) -> AsyncGenerator[None]:
    """Keep the weights at `uri` from removal; afterwards they go unless a LoRA has them.

    Raises `StoreUnavailable`.
    """
    token = secrets.token_hex(8)
    try:
        async with asyncio.timeout(WAIT_S):
            while not await resources.lora_weights.hold(uri, token):  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise StoreUnavailable("the same weights are being removed") from None
    try:
        yield
    finally:
        await resources.lora_weights.release(uri, token)
        await remove_unused_weights(resources)


async def remove_unused_weights(resources: Resources) -> int:
    """Remove the weights that are due; return how many went.

    What a storage that is down keeps is due again in two minutes.
    """
    files, removed = LoraFiles(resources.settings), 0
    for uri in await resources.lora_weights.due():
        try:
            await files.delete(uri)
        except StoreUnavailable as outage:
            _log.warning("stored weights of a LoRA stay for now: %s", outage.message)
            continue
        await resources.lora_weights.gone(uri)
        removed += 1
    return removed
