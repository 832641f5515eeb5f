"""Usage of accounts: each completed job counts once, by day, key and LoRA."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from serve_app.accounts.usage import UsageReader
from serve_app.domain.jobs import CommitReply, JobKind, Lease
from serve_app.domain.requests import GenerationRequest, LoraUse, Request, UpscaleRequest
from serve_app.jobs.queue import new_nonce
from tests.jobs.logical_queue import START_MS, LogicalQueue, roomy_settings
from tests.made_jobs import new_job, stored_image

GENERATION = GenerationRequest(prompt="a boat", loras=(LoraUse("model_x"),), seeds=(1, 2), steps=20)
UPSCALE = UpscaleRequest(image_id="img_x", source_uri="memory://x", source_width=512, source_height=512)
DAY_MS = 86_400_000


async def _complete(queue: LogicalQueue, request: Request, *, key_id: str, seconds: float) -> Lease:
    kind = JobKind.UPSCALE if request is UPSCALE else JobKind.GENERATION
    queue.sync.hset("{job:0}:lora:model_x", mapping={"owner": "", "open": "1", "sha256": "weights"})
    adapter_id = "model_x" if kind is JobKind.GENERATION else ""
    await queue.accept(new_job("ann", request=request, lora_id=adapter_id, key_id=key_id))
    [claim] = await queue.claim("w", pool=kind, nonce=new_nonce(), limit=4)
    images = [stored_image(f"memory://{index}") for index in range(request.num_images)]
    assert await queue.finish(claim.lease, images, seconds=seconds) is CommitReply.OK
    assert await queue.finish(claim.lease, images, seconds=seconds) is CommitReply.DUPLICATE
    return claim.lease


async def test_usage_is_counted_by_day_key_and_lora_and_once_for_a_commit_that_is_repeated(
    redis_url: str, tmp_path: Path
) -> None:
    queue = LogicalQueue(redis_url, roomy_settings(tmp_path), database=5)
    await _complete(queue, GENERATION, key_id="k1", seconds=1.5)
    await _complete(queue, GENERATION, key_id="k1", seconds=0.25)
    await _complete(queue, GENERATION, key_id="", seconds=1)
    queue.advance(DAY_MS)
    await _complete(queue, UPSCALE, key_id="k1", seconds=2)
    reader = UsageReader(queue.client)
    first = datetime.fromtimestamp(START_MS / 1000, UTC).date()
    rows = await reader.days("ann", first + timedelta(days=1), 2)
    assert [(row.day - first).days for row in rows] == [0, 0, 1]
    assert [(row.key_id, row.lora_id, row.images, row.seconds) for row in rows] == [
        ("", "model_x", 2, 1.0),
        ("k1", "model_x", 4, 1.75),
        ("k1", "upscale", 1, 2.0),
    ]
    megapixel_steps = 2 * 20 * 512 * 512 / 1e6
    shown, of_upscale = round(megapixel_steps, 3), round(UPSCALE.work, 3)
    assert [row.megapixel_steps for row in rows] == [shown, 2 * shown, of_upscale]
    assert await reader.days("bob", first, 2) == []
    await queue.close()
