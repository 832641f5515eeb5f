"""An S3-compatible server for the tests of stores."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """moto's server, and the storage options that reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, Any] = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
    }
    import s3fs

    s3fs.S3FileSystem(**options).mkdir("pictures")
    yield options
    server.stop()
