"""After its retention a job is not found, nor is its image."""

import pytest

from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.api.app import Member, TestService, refused
from tests.support import plain_redis


@pytest.mark.parametrize("variant", Variant)
async def test_after_retention_a_record_is_not_found(service: TestService, member: Member, variant: Variant) -> None:
    """Redis removes records itself, here before their time."""
    job = await service.complete(await service.submit(member, variant))
    assert (await service.poll(member, variant, job.id)).status_code == 200
    image_id = job.images[0].image_id
    with plain_redis(service.resources.redis_url) as redis:
        for name in (redis_key("job", job.id), redis_key("image", image_id)):
            assert 0 <= service.resources.settings.retention.total_seconds() - redis.ttl(name) < 60
            redis.expire(name, 0)
    refused(await service.poll(member, variant, job.id), 404, "not_found")
    larger = await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=member.a)
    refused(larger, 404, "not_found")
