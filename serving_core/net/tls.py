"""Define, check and load the TLS files of a process."""

import datetime
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.net.ports import is_loopback

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


Parsed = TypeVar("Parsed")

SCHEME: Final = "https://"
SERVER, CLIENT = "serverAuth", "clientAuth"
CERT, KEY, CA = "--tls-cert", "--tls-key", "--tls-ca"


class TlsError(SettingsError):
    """A certificate, key or CA is missing or unusable."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Hold the paths of PEM files, empty for none: certificate chain, private key, and CAs that verify the peer."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def stamps(self) -> list[tuple[int, ...] | None]:
        """Return values that change when any of the files is written or replaced."""
        return [_stamp(Path(path)) for path in (self.cert, self.key, self.ca) if path]


@dataclass(frozen=True, slots=True)
class Pems:
    """The files' contents; None for no file."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def read_tls(files: TlsFiles) -> Pems:
    """Read and check the files.

    Raises TlsError, which names the file, if it cannot be read, has other content or is not valid today, if the key
    does not match the certificate, or if one of the two is missing.
    """
    if bool(files.cert) != bool(files.key):
        raise TlsError(f"{CERT} and {KEY} belong together: {KEY if files.cert else CERT} is missing")
    pems = Pems(_read(CERT, files.cert), _read(KEY, files.key), _read(CA, files.ca))
    if pems.cert is not None and pems.key is not None:
        _check_pair(files, pems.cert, pems.key)
    if pems.ca is not None:
        problems = [_why_invalid(each) for each in _certificates(CA, files.ca, pems.ca)]
        if all(problems):
            raise TlsError(f"{CA} {files.ca} {problems[0]}")
    return pems


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of an HTTP client. Without a CA, the system's CAs apply.

    Raises TlsError, which names the file, for a file that `read_tls` refuses.
    """
    read_tls(files)
    context = ssl.create_default_context(cafile=files.ca or None)
    if files.cert:
        context.load_cert_chain(files.cert, files.key)
    return context


def hosts_of(files: TlsFiles) -> list[str]:
    """Return the hosts that the certificate is for: names, then addresses; empty if it names none.

    Requires a certificate. Raises TlsError, which names the file, for a file that `read_tls` refuses.
    """
    from cryptography import x509

    pems = read_tls(files)
    assert pems.cert is not None, "there is no certificate"
    try:
        extensions = x509.load_pem_x509_certificates(pems.cert)[0].extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def check_purpose(files: TlsFiles, purpose: str) -> None:
    """Raise TlsError if the certificate restricts its purposes and omits this one, SERVER or CLIENT.

    Does nothing without a certificate.
    """
    pems = read_tls(files)
    if pems.cert is None:
        return
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    oids = {SERVER: ExtendedKeyUsageOID.SERVER_AUTH, CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH}
    try:
        extensions = x509.load_pem_x509_certificates(pems.cert)[0].extensions
        told = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not {oids[purpose], ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(told):
        raise TlsError(f"{CERT} {files.cert} cannot be shown here: its extended key usage lacks {purpose}")


def _check_pair(files: TlsFiles, cert: bytes, key: bytes) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    first = _certificates(CERT, files.cert, cert)[0]
    private = _parsed(f"{KEY} {files.key} holds no private key in PEM without a passphrase", load_pem_private_key, key)
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*form) != first.public_key().public_bytes(*form):
        raise TlsError(f"{KEY} {files.key} is not the key of {CERT} {files.cert}")
    if why := _why_invalid(first):
        raise TlsError(f"{CERT} {files.cert} {why}")


def _certificates(flag: str, path: str, pem: bytes) -> "list[Certificate]":
    """Parse at least one certificate."""
    from cryptography.x509 import load_pem_x509_certificates

    return _parsed(f"{flag} {path} holds no certificate in PEM", lambda data, _: load_pem_x509_certificates(data), pem)


def _parsed(sentence: str, parse: Callable[[bytes, None], Parsed], pem: bytes) -> Parsed:
    try:
        return parse(pem, None)
    except (ValueError, TypeError) as error:  # TypeError: a key with a passphrase
        raise TlsError(sentence) from error


def _why_invalid(certificate: "Certificate") -> str:
    now = datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        return f"has expired: it was valid until {last:%Y-%m-%d %H:%M} UTC"
    return f"is not valid before {first:%Y-%m-%d %H:%M} UTC" if now < first else ""


def _read(flag: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS settings, the same for the coordinator and its nodes; `splitserve certs` creates the files."""

    tls_cert: str = flag("", "Show this certificate chain, up to its CA (PEM).")
    tls_key: str = flag("", "Use this private key of --tls-cert (PEM).")
    tls_ca: str = flag("", "Verify the certificates of the coordinator and its nodes by this CA (PEM).")
    trusted_network: bool = flag(
        False,
        "With TLS, also allow traffic off this machine that TLS cannot protect: ranks on several hosts, torch_dist.",
    )

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


def check_open(what: str, host: str, tls: TlsSettings) -> None:
    """Raise SettingsError if a process that uses TLS would open `what` to other machines, at `host`, without TLS.

    --trusted-network allows it.
    """
    if (tls.tls_cert or tls.tls_ca) and not tls.trusted_network and not is_loopback(host):
        raise SettingsError(
            f"{what} is neither authenticated nor encrypted, and {host} is not a loopback address: "
            "--trusted-network says that nobody else can reach it"
        )
