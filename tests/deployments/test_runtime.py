"""The environment of the machine's Ray runtime."""

from pathlib import Path

from deployments.runtime import ray_environment

CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_is_in_the_kernels_range_for_clients(tmp_path: Path) -> None:
    """Otherwise a client's connection may take a port before it is listened on, and the start fails."""
    first_of_clients = int(CLIENTS.read_text().split()[0]) if CLIENTS.exists() else 32_768
    (tmp_path / "home").mkdir()
    ports = {name: int(port) for name, port in ray_environment(tmp_path / "home").items() if name.endswith("_PORT")}
    assert len(ports) == 4
    assert len(set(ports.values())) == 4
    assert all(port < first_of_clients for port in ports.values())
