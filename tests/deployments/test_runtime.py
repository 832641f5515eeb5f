"""The environment and the logs of the machine's Ray runtime."""

from pathlib import Path

from deployments.runtime import Runtime, ray_environment

CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_is_in_the_kernels_range_for_clients(tmp_path: Path) -> None:
    """Otherwise a client's connection may take a port before it is listened on, and the start fails."""
    first_of_clients = int(CLIENTS.read_text().split()[0]) if CLIENTS.exists() else 32_768
    (tmp_path / "home").mkdir()
    ports = {name: int(port) for name, port in ray_environment(tmp_path / "home").items() if name.endswith("_PORT")}
    assert len(ports) == 4
    assert len(set(ports.values())) == 4
    assert all(port < first_of_clients for port in ports.values())


def test_the_logs_of_the_last_sessions_are_kept(tmp_path: Path) -> None:
    """What else Ray has left of them is not."""
    for second in range(10, 17):
        session = tmp_path / "ray" / f"session_2026-11-26_11-13-{second}_123456_7"
        (session / "logs" / "serve").mkdir(parents=True)
        (session / "sockets").mkdir()
        (session / "node_ip_address.json").touch()
    (tmp_path / "ray" / "session_latest").symlink_to("session_2026-11-26_11-13-16_123456_7")
    (tmp_path / "ray" / "ray_current_cluster").touch()
    runtime = Runtime(tmp_path)
    left = sorted(str(path.relative_to(tmp_path / "ray")) for path in tmp_path.glob("ray/*/*"))
    assert left == [f"session_2026-11-26_11-13-{second}_123456_7/logs" for second in range(13, 17)]
    assert runtime.said == "", "a start that fails before Ray names no logs of another"
