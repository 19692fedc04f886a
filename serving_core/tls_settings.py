"""Define the TLS settings of every process of the fleet. The flags derive from these fields."""

from dataclasses import dataclass

from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.ports import is_loopback
from serving_core.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS settings, the same for the coordinator and its nodes; `splitserve certs` creates the files."""

    tls_cert: str = flag("", "Certificate chain of this process, up to its CA (PEM).")
    tls_key: str = flag("", "Private key of --tls-cert (PEM).")
    tls_ca: str = flag("", "CA of the fleet (PEM), which verifies the certificates of the coordinator and its nodes.")
    trusted_network: bool = flag(
        False,
        "With TLS, also allow traffic off this machine that TLS cannot protect: ranks on several hosts, torch_dist.",
    )

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


def check_open(what: str, host: str, tls: TlsSettings) -> None:
    """Raise SettingsError if a process that uses TLS would expose `what` without TLS to other machines."""
    if (tls.tls_cert or tls.tls_ca) and not tls.trusted_network and not is_loopback(host):
        raise SettingsError(
            f"{what} is neither authenticated nor encrypted, and {host} is not a loopback address: "
            "--trusted-network says that nobody else can reach it"
        )
