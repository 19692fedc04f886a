"""Make a private certificate authority in a folder, and one certificate for each role."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serving_core.errors import SettingsError
from serving_core.net.tls import TlsError, TlsFiles, read_tls

AUTHORITY: Final = "ca"
COORDINATOR: Final = "coordinator"
# Who shows a certificate to whom. The coordinator's is for its nodes too where `splitserve up` runs both.
ROLES: Final = {
    COORDINATOR: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    "node": (ExtendedKeyUsageOID.CLIENT_AUTH,),
    "client": (ExtendedKeyUsageOID.CLIENT_AUTH,),
}
THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")
HOST_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
AUTHORITY_DAYS: Final = 3650
BACKDATED: Final = datetime.timedelta(hours=1)  # clocks of machines differ


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str], days: int) -> bool:
    """Write a certificate and a key for each role to a folder, valid for `days` days; return whether the CA is new.

    The CA of the folder signs them, or a new one if it has none. The coordinator's certificate is for this machine,
    `hosts`, and the hosts of the certificate that it replaces. Raises SettingsError if a host is malformed, the CA ends
    before that, or a file cannot be read or written.
    """
    given = [_name(host) for host in (*THIS_MACHINE, *hosts)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not any(path.exists() for path in _paths(folder, AUTHORITY))
        authority = _authority(days=max(days, AUTHORITY_DAYS)) if is_new else _read_authority(folder)
        ends = authority.certificate.not_valid_after_utc
        if not is_new and datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days) > ends:
            raise SettingsError(f"--days {days} is beyond the end of the CA in {folder}, {ends:%Y-%m-%d}")
        names = list(dict.fromkeys((*given, *_names_before(folder))))
        if is_new:
            _write(folder, AUTHORITY, authority)
        for role, purposes in ROLES.items():
            _write(folder, role, _certificate(authority, role, purposes, names if role == COORDINATOR else [], days))
    except OSError as error:
        raise SettingsError(f"certificates cannot be written to {folder}: {error.strerror}") from error
    return is_new


def _authority(days: int) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("private CA")
    builder = _builder(subject, subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Issued(builder.sign(key, hashes.SHA256()), key)


def _certificate(
    authority: Issued, role: str, purposes: Sequence[x509.ObjectIdentifier], names: list[x509.GeneralName], days: int
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_subject(role), authority.certificate.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(signer, critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - BACKDATED,
        not_valid_after=now + datetime.timedelta(days=days),
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(role: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"SplitServe {role}")])


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not HOST_NAME.fullmatch(host):
        raise SettingsError(f"--host {host!r:.80} is neither an address nor a name in ASCII, with no port behind it")
    return x509.DNSName(host)


def _names_before(folder: Path) -> list[x509.GeneralName]:
    """What the coordinator's certificate is for that is in the folder; nothing where there is none that can be read."""
    certificate, _ = _paths(folder, COORDINATOR)
    try:
        extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
        return list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []


def _read_authority(folder: Path) -> Issued:
    certificate, key = _paths(folder, AUTHORITY)
    try:
        pems = read_tls(TlsFiles(str(certificate), str(key)))
    except TlsError as error:
        raise SettingsError(f"the CA in {folder} cannot sign: {error}") from error
    assert pems.cert is not None
    assert pems.key is not None
    private = load_pem_private_key(pems.key, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{key} is no key that `splitserve certs` has made")
    return Issued(x509.load_pem_x509_certificate(pems.cert), private)


def _write(folder: Path, role: str, issued: Issued) -> None:
    certificate, key = _paths(folder, role)
    _replace(key, issued.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _replace(certificate, issued.certificate.public_bytes(Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replace the file at once, so that no reader sees half of it."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    new.replace(path)


def _paths(folder: Path, role: str) -> tuple[Path, Path]:
    return folder / f"{role}.crt", folder / f"{role}.key"
