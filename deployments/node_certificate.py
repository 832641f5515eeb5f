"""Makes a node's certificate for Ray's TLS: `python -m deployments.node_certificate CA_CERT CA_KEY FOLDER NAME...`.

NAME is an address or DNS name by which other nodes call this one. Ray asks both ends of every connection for a
certificate of the same CA, and the called end for one with the name it was called by.
"""

import argparse
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serve_app.atomic_files import PRIVATE_FOLDER, write_atomically

LIFE = timedelta(days=3650)
"""Ray reads its certificate once, when it starts, and may run for years."""
CLOCKS_DIFFER_BY = timedelta(hours=1)
OWN_NAMES = ("localhost", "127.0.0.1")


class Authority(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def new_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("ray-ca")
    builder = _builder(name, key).issuer_name(name)
    return Authority(
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256()),
        key,
    )


def read_authority(certificate: Path, key: Path) -> Authority:
    """Read a CA. Raises `ValueError` when the files are no certificate and EC or RSA key."""
    return Authority(
        x509.load_pem_x509_certificate(certificate.read_bytes()),
        load_pem_private_key(key.read_bytes(), password=None),  # pyright: ignore[reportArgumentType]
    )


def write_certificate(authority: Authority, folder: Path, *names: str) -> dict[str, str]:
    """Write the node's key and certificate and the CA's certificate; return the variables that have to name them."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name("ray"), key)
        .issuer_name(authority.certificate.subject)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in (*OWN_NAMES, *names)]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    texts = {
        "RAY_TLS_SERVER_CERT": (folder / "tls.crt", certificate.public_bytes(Encoding.PEM)),
        "RAY_TLS_SERVER_KEY": (folder / "tls.key", private),
        "RAY_TLS_CA_CERT": (folder / "ca.crt", authority.certificate.public_bytes(Encoding.PEM)),
    }
    for file, text in texts.values():
        write_atomically(file, text.decode())
    return {"RAY_USE_TLS": "1", **{name: str(file) for name, (file, _) in texts.items()}}


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER_BY)
        .not_valid_after(now + LIFE)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("ca_cert", "ca_key", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("name", nargs="+")
    options = parser.parse_args()
    write_certificate(read_authority(options.ca_cert, options.ca_key), options.folder, *options.name)


if __name__ == "__main__":
    main()
