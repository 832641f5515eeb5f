"""The certificate with which an operator signs pictures: read and checked, or made for development."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serve_app.atomic_files import write_atomically
from serve_app.domain.errors import AtelierError

DEVELOPMENT = "Atelier development, trusted by nobody"
"""The organization of certificates that are made here, which readers of a picture are shown."""
LIFE = timedelta(days=365)
CLOCKS_DIFFER_BY = timedelta(hours=1)
_CURVES = {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}


class BadMarking(AtelierError):
    """Pictures cannot be marked as the settings say."""


class Credentials(NamedTuple):
    """A certificate with its chain, and its key, both PEM; `algorithm` is C2PA's name of how they sign."""

    chain: bytes
    key: bytes
    algorithm: str
    organization: str
    ends: datetime

    @property
    def is_development(self) -> bool:
        return self.organization == DEVELOPMENT


def read_credentials(certificate: Path, key: Path) -> Credentials:
    """Read the files. Raises `BadMarking` where they are not there, do not belong together, or do not sign now."""
    try:
        chain, secret = certificate.read_bytes(), key.read_bytes()
        leaf, private = x509.load_pem_x509_certificates(chain)[0], load_pem_private_key(secret, password=None)
    except OSError as error:
        raise BadMarking(
            f"{error.filename}: {error.strerror}; name the files by ATELIER_MARKING_CERTIFICATE and "
            "ATELIER_MARKING_KEY, or make some for development: atelier marking init"
        ) from error
    except (ValueError, TypeError) as error:
        raise BadMarking(f"{certificate} or {key}: is no PEM that can be read ({error})") from error
    now = datetime.now(UTC)
    if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
        when = "has expired" if now > leaf.not_valid_after_utc else "is not valid yet"
        raise BadMarking(
            f"ATELIER_MARKING_CERTIFICATE: {certificate} {when}: it is for {leaf.not_valid_before_utc:%Y-%m-%d} to "
            f"{leaf.not_valid_after_utc:%Y-%m-%d}"
        )
    public = [each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
              for each in (leaf.public_key(), private.public_key())]  # fmt: skip
    if public[0] != public[1]:
        raise BadMarking(f"ATELIER_MARKING_KEY: {key} is not the key of {certificate}")
    names = leaf.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return Credentials(
        chain, secret, _algorithm(private), str(names[0].value) if names else "", leaf.not_valid_after_utc
    )


def _algorithm(key: object) -> str:
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return _CURVES[key.curve.name]
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return "ed25519"
    if isinstance(key, rsa.RSAPrivateKey):
        return "ps256"
    raise BadMarking("ATELIER_MARKING_KEY: C2PA signs with P-256, P-384, P-521, Ed25519 and RSA keys alone")


def make_for_development(certificate: Path, key: Path, *, ends: datetime | None = None) -> None:
    """Write a certificate and the CA's that signed it, and its key. The CA's own key is forgotten.

    The leaf has what C2PA asks of a signer (C2PA 2.2, 14.5.1): a digital signature as its only use, and the extended use
    of e-mail protection, which all of its readers know. Raises `FileExistsError` where there is one.
    """
    for file in (certificate, key):
        if file.exists():
            raise FileExistsError(f"{file} is there already; remove it first, if pictures may have another signer")
    ends = ends or datetime.now(UTC) + LIFE
    root_key, leaf_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name, leaf_name = _name("Development CA"), _name("Development signer")
    usage = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    signs, certifies = (
        x509.KeyUsage(**{each: each in used for each in usage})
        for used in (("digital_signature",), ("key_cert_sign", "crl_sign"))
    )
    root = (
        _builder(root_name, root_name, root_key, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(certifies, critical=True)
        .sign(root_key, hashes.SHA256())
    )
    leaf = (
        _builder(leaf_name, root_name, leaf_key, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    chain = b"".join(each.public_bytes(Encoding.PEM) for each in (leaf, root))
    private = leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for file, text in ((key, private), (certificate, chain)):
        write_atomically(file, text)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends - LIFE) - CLOCKS_DIFFER_BY)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    named = {NameOID.ORGANIZATION_NAME: DEVELOPMENT, NameOID.COMMON_NAME: common_name}
    return x509.Name([x509.NameAttribute(kind, text) for kind, text in named.items()])
