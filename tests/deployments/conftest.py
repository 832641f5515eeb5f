"""The session's `atelier up`, by short names."""

import pytest

from tests.deployments.service import Service


@pytest.fixture(scope="session")
def service(started_service: Service) -> Service:
    return started_service


@pytest.fixture
def dying(started_service: Service) -> Service:
    """The same for the test that ends it, which runs after all others (`tests/conftest.py`)."""
    return started_service
