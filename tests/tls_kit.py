"""Private CAs and certificates of all kinds, made with cryptography's own builder or the command's."""

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from serving_core.net.tls import TlsFiles
from splitserve.authority import make_certificates


def authority(folder: Path, *hosts: str) -> Path:
    """A folder as `splitserve certs` makes it."""
    make_certificates(folder, hosts, days=30)
    return folder


def files_of(folder: Path, role: str) -> TlsFiles:
    return TlsFiles(str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / "ca.crt"))


def flags_of(folder: Path, role: str) -> dict[str, str]:
    """The same as flags by their names with underscores."""
    files = files_of(folder, role)
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}


def with_dates(folder: Path, role: str, first_days: int, last_days: int) -> None:
    """Puts a certificate in the place of a role's that differs in its dates alone, as so many days from now."""
    now = datetime.datetime.now(datetime.UTC)
    old = x509.load_pem_x509_certificate((folder / f"{role}.crt").read_bytes())
    dates = [now + datetime.timedelta(days=days) for days in (first_days, last_days)]
    _sign_again(folder, role, dates, list(old.extensions))


def for_servers_alone(folder: Path) -> None:
    """Puts a certificate in the place of the coordinator's that cannot be shown to servers, as those of public CAs."""
    _with_extension(folder, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))


def for_one_host(folder: Path, host: str) -> None:
    """Puts one in the place of the coordinator's that is for this host alone."""
    _with_extension(folder, x509.SubjectAlternativeName([x509.DNSName(host)]))


def _with_extension(folder: Path, extension: x509.ExtensionType) -> None:
    old = x509.load_pem_x509_certificate((folder / "coordinator.crt").read_bytes())
    others = [each for each in old.extensions if each.oid != extension.oid]
    extensions = [*others, x509.Extension(extension.oid, False, extension)]
    _sign_again(folder, "coordinator", [old.not_valid_before_utc, old.not_valid_after_utc], extensions)


def _sign_again(
    folder: Path, role: str, dates: list[datetime.datetime], extensions: list[x509.Extension[x509.ExtensionType]]
) -> None:
    path = folder / f"{role}.crt"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), x509.random_serial_number(), *dates, extensions
    )
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    signed = builder.sign(signer, hashes.SHA256())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def shown_at(port: int, folder: Path, role: str = "", protocol: str = "http/1.1") -> int:
    """The serial number of the certificate that a port shows to Python's own TLS, which must be of the folder's CA."""
    import socket

    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.set_alpn_protocols([protocol])
    if role:
        files = files_of(folder, role)
        context.load_cert_chain(files.cert, files.key)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def serial_of(path: str | Path) -> int:
    return x509.load_pem_x509_certificate(Path(path).read_bytes()).serial_number
