"""What gRPC's words for a connection that did not come about mean, where TLS is in question. Pure."""

from typing import Final

_LEAVES: Final = "what listens there hangs up in the handshake: it may ask for a certificate of its CA (--tls-cert)"
_HUNG_UP: Final = ("Socket closed", "Connection reset", "Broken pipe")  # which of them is a matter of moments
_OVER_TLS: Final = (  # the first that fits counts
    ("certificate has expired", "the certificate that is shown there has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate that is shown there is of no CA that is known here: see --tls-ca"),
    ("Hostname Verification", "the certificate that is shown there is for other names than the one that was dialled"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    *((words, _LEAVES) for words in _HUNG_UP),
)
_HANGS_UP: Final = "what listens there hangs up at once, as a TLS port does"
_IN_THE_OPEN: Final = tuple((words, _HANGS_UP) for words in _HUNG_UP)


def why_no_handshake(details: str, *, over_tls: bool) -> str | None:
    """What is wrong with whoever was dialled; None where it is not a matter of TLS."""
    return next((what for words, what in (_OVER_TLS if over_tls else _IN_THE_OPEN) if words in details), None)
