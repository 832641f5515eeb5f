"""Settings whose limits no caller of a benchmark meets."""

from pathlib import Path

import yaml

from serve_app.settings import ROOT, Settings


def roomy_settings(folder: Path) -> Settings:
    """Limits that no caller of a benchmark meets."""
    plans = folder / "plans.yaml"
    plans.write_text(yaml.safe_dump([{"interface": "a", "name": "roomy", "limit": 10**9, "window_s": 3600}]))
    return Settings(
        data_dir=folder / "var",
        plans=plans,
        max_queued=10**7,
        max_queued_per_account=10**7,
        polls_per_second=10**9,
        lora_samples=False,
        catalog=ROOT / "configs" / "catalog.yaml",
    )
