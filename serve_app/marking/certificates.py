"""The certificate with which an operator signs pictures: read, or made for development."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serve_app.atomic_files import write_atomically
from serve_app.domain.errors import AtelierError

DEVELOPMENT = "Atelier development, trusted by nobody"
"""The organization of certificates that are made here, which readers of a picture are shown."""
LIFE, CLOCKS_DIFFER_BY = timedelta(days=365), timedelta(hours=1)
_CURVES = {256: "es256", 384: "es384", 521: "es512"}
_USES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


class BadMarking(AtelierError):
    """Pictures cannot be marked as the settings say."""


class CertificateEnded(BadMarking):
    """The certificate has ended since the start, and its files hold no other yet."""


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
    """Read the files. Raises `BadMarking` where they are not there, cannot be read, or are not for today."""
    try:
        chain, secret = certificate.read_bytes(), key.read_bytes()
        leaf, private = x509.load_pem_x509_certificates(chain)[0], load_pem_private_key(secret, password=None)
    except OSError as error:
        advice = "name ATELIER_MARKING_CERTIFICATE and ATELIER_MARKING_KEY, or try: atelier marking init"
        raise BadMarking(f"ATELIER_MARK_IMAGES: {error.filename}: {error.strerror}; {advice}") from error
    except (ValueError, TypeError) as error:
        raise BadMarking(f"{certificate} or {key}: is no PEM that can be read ({error})") from error
    begins, ends, now = leaf.not_valid_before_utc, leaf.not_valid_after_utc, datetime.now(UTC)
    if not begins <= now <= ends:
        when = "has expired" if now > ends else "is not valid yet"
        told = f"{certificate} {when}: it is for {begins:%Y-%m-%d} to {ends:%Y-%m-%d}"
        raise BadMarking(f"ATELIER_MARKING_CERTIFICATE: {told}")
    names = leaf.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if isinstance(private, ec.EllipticCurvePrivateKey):
        algorithm = _CURVES.get(private.key_size, "")
    else:
        algorithm = "ps256" if isinstance(private, rsa.RSAPrivateKey) else "ed25519"
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # C2PA's library reads no other
    return Credentials(chain, secret, algorithm, str(names[0].value) if names else "", ends)


def make_for_development(certificate: Path, key: Path, *, ends: datetime | None = None) -> None:
    """Write a certificate and the CA's that signed it, and its key. The CA's own key is forgotten.

    The leaf is as C2PA asks of a signer: signatures are its only use, and e-mail protection is its extended use, which
    all of C2PA's readers know. Raises `FileExistsError` where there is one.
    """
    for file in (certificate, key):
        if file.exists():
            raise FileExistsError(f"{file} is there already; remove it first, if pictures may have another signer")
    ends = ends or datetime.now(UTC) + LIFE
    root_key, leaf_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root, leaf = (_builder(name, each, ends, ca=each is root_key)
                  for name, each in (("Development CA", root_key), ("Development signer", leaf_key)))  # fmt: skip
    email = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    leaf = leaf.add_extension(email, critical=False).add_extension(issuer, critical=False)
    signed = [each.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM) for each in (leaf, root)]
    write_atomically(key, leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_atomically(certificate, b"".join(signed))


def _builder(common_name: str, key: ec.EllipticCurvePrivateKey, ends: datetime, *, ca: bool) -> x509.CertificateBuilder:
    used = ("key_cert_sign", "crl_sign") if ca else ("digital_signature",)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(_name("Development CA"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - LIFE - CLOCKS_DIFFER_BY)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(x509.KeyUsage(**{use: use in used for use in _USES}), critical=True)
    )


def _name(common_name: str) -> x509.Name:
    named = {NameOID.ORGANIZATION_NAME: DEVELOPMENT, NameOID.COMMON_NAME: common_name}
    return x509.Name([x509.NameAttribute(kind, text) for kind, text in named.items()])
