"""Settings are read from the environment; a wrong one is refused in one line that begins with its name."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app.cli.command import BadUsage, read_settings
from serve_app.settings import Settings


def test_local_secrets_are_made_once_and_kept_private(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        peppers = set(pool.map(lambda _: Settings(data_dir=tmp_path).pepper_bytes, range(16)))
    assert len(peppers) == 1
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secrets.json"]


def test_secrets_from_the_environment_win_and_never_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_PEPPER", "sixteen bytes of spice")
    monkeypatch.setenv("ATELIER_SIGNING_KEYS", f'{{"new": "{"n" * 16}", "old": "{"o" * 16}"}}')
    settings = Settings(data_dir=tmp_path)
    assert settings.pepper_bytes == b"sixteen bytes of spice"
    assert list(settings.url_keys) == ["new", "old"]
    assert "spice" not in repr(settings)
    assert not (tmp_path / "secrets.json").exists()


WRONG = {
    "ATELIER_RETENTION=-P1D": "ATELIER_RETENTION: input should be greater than 0",
    "ATELIER_LEASE=PT0S": "ATELIER_LEASE: input should be greater than 0",
    "ATELIER_LEASE=soon": "ATELIER_LEASE: input should be a valid timedelta",
    "ATELIER_AUDIT_LIFE=P999999999D": "ATELIER_AUDIT_LIFE: input should be less than or equal to 36525 days",
    "ATELIER_REDIS_WAIT=-PT1S": "ATELIER_REDIS_WAIT: input should be greater than 0",
    "ATELIER_MODERATION_TIMEOUT=PT0S": "ATELIER_MODERATION_TIMEOUT: input should be greater than 0",
    "ATELIER_MAX_QUEUED=0": "ATELIER_MAX_QUEUED: input should be greater than or equal to 1",
    "ATELIER_DISK_RESERVE=-5": "ATELIER_DISK_RESERVE: could not parse value",
    "ATELIER_RETENTON=P1D": "ATELIER_RETENTON: there is no such setting; the nearest is ATELIER_RETENTION",
    "atelier_plan=x": "ATELIER_PLAN: there is no such setting; the nearest is ATELIER_PLANS",
    "ATELIER_SERVICE_PORT=http": "ATELIER_SERVICE_PORT: there is no such setting",
    "ATELIER_STORAGE_URL=s3//bucket": "ATELIER_STORAGE_URL: must be an address like s3://bucket/prefix",
    "ATELIER_STORAGE_URL=s3:///prefix": "ATELIER_STORAGE_URL: must be an address like s3://bucket/prefix",
    "ATELIER_STORAGE_URL=file://images": "ATELIER_STORAGE_URL: must be an address like s3://bucket/prefix",
    "ATELIER_IMAGE_ENDPOINT=bucket": "ATELIER_IMAGE_ENDPOINT: must be an address like https://",
    "ATELIER_IMAGE_ENDPOINT=https://bucket": "ATELIER_IMAGE_ENDPOINT: an address is for a storage of s3://",
    "ATELIER_PUBLIC_URL=images.example.com": "ATELIER_PUBLIC_URL: must be an address like https://",
    "ATELIER_PUBLIC_URL=https://example.com:port": "ATELIER_PUBLIC_URL: must be an address like https://",
    "ATELIER_PUBLIC_URL=https://example.com/?a=b": "ATELIER_PUBLIC_URL: must be an address without a query",
    "ATELIER_MODERATION_URL=ftp://moderation": "ATELIER_MODERATION_URL: must be an address like https://",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=collector:4318": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: must be an address",
    "REDIS_URL=http://db": "REDIS_URL: must be a redis://",
    "ATELIER_PEPPER=fifteen bytes..": "ATELIER_PEPPER: must have 16 bytes or more",
    'ATELIER_PEPPERS={"1": "x"}': "ATELIER_PEPPERS.1: must have 16 bytes or more",
    'ATELIER_SIGNING_KEYS={"k": "x"}': "ATELIER_SIGNING_KEYS.k: must have 16 bytes or more",
    "ATELIER_STORAGE_OPTIONS=no JSON": "ATELIER_STORAGE_OPTIONS: must be JSON",
    "ATELIER_TRUSTED_PROXIES=10.0.0.300": "ATELIER_TRUSTED_PROXIES.0: input is not a valid IPv4 network",
    "ATELIER_CORS_ORIGINS=https://a.example,*": "ATELIER_CORS_ORIGINS.1: string should match pattern '^https?://",
    "ATELIER_CORS_ORIGINS=https://a.example/": "ATELIER_CORS_ORIGINS.0: string should match pattern '^https?://",
    "ATELIER_LOG_LEVEL=LOUD": "ATELIER_LOG_LEVEL: must be one of CRITICAL, ",
    "ATELIER_DATA_DIR=": "ATELIER_DATA_DIR: must not be empty",
}


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_setting_is_refused_by_its_name(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = given.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(BadUsage) as refused:
        read_settings()
    assert refused.value.format_message().startswith(WRONG[given])


def test_a_secret_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_PEPPER", "spice")
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert "spice" not in str(refused.value)


@pytest.mark.parametrize("url", ["file:///srv/my images", "s3://bucket", "az:///container/images", "memory://x"])
def test_storage_may_be_whatever_fsspec_reads(url: str) -> None:
    assert Settings(storage_url=url).storage == url


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's, the proxy's, and what Kubernetes sets for services called `atelier` and `atelier-redis-jobs`."""
    others = {
        "ATELIER_URL": "http://127.0.0.1:8000",
        "ATELIER_BASE_URL": "http://127.0.0.1:8000",
        "ATELIER_KEY": "atl_0",
        "ATELIER_CONNECTIONS_PER_ADDRESS": "10",
        "ATELIER_SERVICE_HOST": "10.0.0.1",
        "ATELIER_SERVICE_PORT_SERVE": "8000",
        "ATELIER_PORT": "tcp://10.0.0.1:8000",
        "ATELIER_REDIS_JOBS_PORT_6379_TCP": "tcp://10.0.0.2:6379",
        "ATELIER_REDIS_JOBS_PORT_6379_TCP_ADDR": "10.0.0.2",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    assert read_settings(log_level="debug").log_level == "DEBUG"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("interface: c, name: x, limit: 1, window_s: 1", "0.interface: input should be 'a' or 'b'"),
        ("interface: a, name: x, limit: 0, window_s: 1", "0.limit: input should be greater than or equal to 1"),
        ("interface: a, name: x, limit: 1, window_s: -1", "0.window_s: input should be greater than 0"),
        ("interface: a, name: x, limits: 1, window_s: 1", "0.limits: extra inputs are not permitted"),
    ],
)
def test_a_wrong_plan_is_refused_by_its_field(row: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plans.yaml").write_text(f"- {{{row}}}")
    with pytest.raises(BadUsage, match=re.escape(f"plans.yaml: {message}")):
        read_settings(plans=tmp_path / "plans.yaml")


def test_redis_url_has_its_common_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://db:6379/1")
    assert Settings().redis_url == "redis://db:6379/1"
