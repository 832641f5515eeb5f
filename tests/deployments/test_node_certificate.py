"""An operator makes certificates for Ray's TLS on each node, and `atelier up` makes its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deployments.node_certificate import new_authority, write_certificate
from deployments.requirements import of_network
from deployments.runtime import encryption
from tests.support import ROOT


def test_a_node_s_certificate_is_the_authority_s_and_for_the_names_it_is_called_by(tmp_path: Path) -> None:
    authority = new_authority()
    key = authority.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "ca.key").write_bytes(key)
    files, names = ("ca.crt", "ca.key", "node"), ("10.0.0.7", "*.atelier.svc.cluster.local")
    command = [sys.executable, "-m", "deployments.node_certificate", *(str(tmp_path / file) for file in files), *names]
    subprocess.run(command, cwd=ROOT, check=True)
    certificate = x509.load_pem_x509_certificate((tmp_path / "node" / "tls.crt").read_bytes())
    certificate.verify_directly_issued_by(authority.certificate)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(found.get_values_for_type(x509.DNSName)) == {"localhost", "*.atelier.svc.cluster.local"}
    assert set(map(str, found.get_values_for_type(x509.IPAddress))) == {"127.0.0.1", "10.0.0.7"}
    assert (tmp_path / "node" / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()
    assert (tmp_path / "node" / "tls.key").stat().st_mode & 0o077 == 0


def test_what_is_written_is_what_a_cluster_asks_for(tmp_path: Path) -> None:
    assert not list(of_network(write_certificate(new_authority(), tmp_path), is_encrypted=False))


def test_up_has_an_authority_of_its_own_unless_the_operator_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    first, second = ((tmp_path / name) for name in ("first", "second"))
    assert encryption(first)["RAY_USE_TLS"] == encryption(second)["RAY_USE_TLS"] == "1"
    assert (first / "tls" / "ca.crt").read_text() != (second / "tls" / "ca.crt").read_text()
    assert {file.name for file in (first / "tls").iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    monkeypatch.setenv("RAY_USE_TLS", "0")
    assert encryption(tmp_path) == {}
