"""The session's `atelier up`, by a short name."""

import pytest

from tests.deployments.service import Service


@pytest.fixture(scope="session")
def service(started_service: Service) -> Service:
    return started_service
