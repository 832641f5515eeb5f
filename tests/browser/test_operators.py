"""An operator repairs what made a job fail, queues it again, and sees it go."""

from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, expect

from serve_app.domain.jobs import JobState
from tests.browser.broken_lora import break_lora, fail_job, has_state
from tests.browser.site import Site, sign_in
from tests.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]


async def test_a_failed_job_is_queued_again_and_leaves_the_list(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    lora = site.run(break_lora(site.resources, tmp_path))
    job_id = site.run(fail_job(site.resources, lora))
    page = await context.new_page()
    await sign_in(page, site.operator_url())
    await page.get_by_role("link", name="failed").click()
    row = page.get_by_role("row").filter(has_text=job_id[:12])
    await expect(row).to_contain_text("lora_unavailable")
    lora.repair()
    await row.get_by_role("button", name="Requeue").click()
    await expect(page.get_by_role("status")).to_have_text("1 job queued again.")
    await expect(row).to_have_count(0)
    await wait_until(lambda: site.run(has_state(site.resources, job_id, JobState.COMPLETED)))
