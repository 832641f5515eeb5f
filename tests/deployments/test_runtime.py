"""The machine's own Ray runtime: what it finds in its environment."""

from pathlib import Path

from deployments.runtime import ray_environment

CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_of_ours_is_one_that_the_kernel_gives_to_clients(tmp_path: Path) -> None:
    """It was: a client's connection took a port between our looking and our listening, and the start failed."""
    first_of_clients = int(CLIENTS.read_text().split()[0]) if CLIENTS.exists() else 32_768
    (tmp_path / "home").mkdir()
    ports = {name: int(port) for name, port in ray_environment(tmp_path / "home").items() if name.endswith("_PORT")}
    assert len(ports) == 6
    assert len(set(ports.values())) == 6
    assert all(port < first_of_clients for port in ports.values())
