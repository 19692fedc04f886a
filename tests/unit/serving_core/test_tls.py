"""TLS files that cannot be used are named before anything is done with them."""

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from serving_core.errors import SettingsError
from serving_core.flags import build
from serving_core.net.tls import (
    CLIENT,
    SERVER,
    TlsError,
    TlsFiles,
    TlsSettings,
    check_open,
    check_purpose,
    client_context,
    hosts_of,
    read_tls,
)
from serving_node.settings import NodeSettings, check_network
from tests.tls_kit import authority, files_of, flags_of, for_servers_alone, with_dates


@pytest.fixture
def folder(tmp_path):
    return authority(tmp_path / "certs")


def problem_of(files):
    with pytest.raises(TlsError) as caught:
        read_tls(files)
    return str(caught.value)


def test_what_fits_together_is_read_as_it_is(folder):
    files = files_of(folder, "node")
    pems = read_tls(files)
    assert [pems.cert, pems.key, pems.ca] == [Path(path).read_bytes() for path in (files.cert, files.key, files.ca)]
    assert read_tls(TlsFiles()) == read_tls(TlsFiles("", "", ""))


def test_a_certificate_and_its_key_belong_together(folder):
    files = files_of(folder, "node")
    assert problem_of(TlsFiles(files.cert)) == "--tls-cert and --tls-key belong together: --tls-key is missing"
    assert problem_of(TlsFiles(key=files.key)) == "--tls-cert and --tls-key belong together: --tls-cert is missing"


def test_a_key_that_is_another_certificates(folder):
    cert, key = folder / "coordinator.crt", folder / "node.key"
    assert problem_of(TlsFiles(str(cert), str(key))) == f"--tls-key {key} is not the key of --tls-cert {cert}"


def test_files_that_are_missing_or_something_else(folder):
    files = files_of(folder, "node")
    assert problem_of(TlsFiles("nowhere", files.key)) == "--tls-cert nowhere cannot be read: No such file or directory"
    swapped = TlsFiles(files.key, files.cert)
    assert problem_of(swapped) == f"--tls-cert {files.key} holds no certificate in PEM"
    sentence = f"--tls-key {files.cert} holds no private key in PEM without a passphrase"
    assert problem_of(TlsFiles(files.cert, files.cert)) == sentence
    assert problem_of(TlsFiles(ca=files.key)) == f"--tls-ca {files.key} holds no certificate in PEM"


def test_a_key_with_a_passphrase(folder):
    files = files_of(folder, "node")
    key = load_pem_private_key(Path(files.key).read_bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path(files.key).write_bytes(key.private_bytes(*form))
    assert problem_of(files) == f"--tls-key {files.key} holds no private key in PEM without a passphrase"


@pytest.mark.parametrize(
    ("first_days", "last_days", "words"), [(-9, -2, "has expired: it was valid until "), (2, 9, "is not valid before ")]
)
def test_a_certificate_that_is_not_valid_today(folder, first_days, last_days, words):
    with_dates(folder, "node", first_days, last_days)
    files = files_of(folder, "node")
    assert problem_of(files).startswith(f"--tls-cert {files.cert} {words}")


def test_of_several_cas_one_that_is_valid_is_enough(folder, tmp_path):
    files, bundle = files_of(folder, "ca"), tmp_path / "bundle.pem"
    with_dates(folder, "ca", -9, -2)
    assert problem_of(TlsFiles(ca=files.ca)).startswith(f"--tls-ca {files.ca} has expired")
    other = authority(tmp_path / "other") / "ca.crt"
    bundle.write_bytes(Path(files.ca).read_bytes() + other.read_bytes())
    assert read_tls(TlsFiles(ca=str(bundle))).ca == bundle.read_bytes()


def test_a_client_asks_for_the_ca_and_the_name(folder):
    context = client_context(files_of(folder, "client"))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert [dict(pair for (pair,) in each["subject"])["commonName"] for each in context.get_ca_certs()] == [
        "SplitServe private CA"
    ]


def test_the_hosts_of_a_certificate(folder):
    assert hosts_of(files_of(folder, "coordinator")) == ["localhost", "127.0.0.1", "::1"]
    assert hosts_of(files_of(folder, "client")) == []


@pytest.mark.parametrize("role", ["coordinator", "node", "client", "ca"])
def test_a_certificate_is_shown_for_what_it_says(folder, role):
    """Those of coordinators for both ends; that of the CA does not say."""
    check_purpose(TlsFiles(), SERVER)
    check_purpose(files_of(folder, role), CLIENT)
    if role in ("coordinator", "ca"):
        check_purpose(files_of(folder, role), SERVER)
    else:
        with pytest.raises(TlsError, match=rf"^--tls-cert {folder}/{role}.crt cannot .* usage lacks serverAuth$"):
            check_purpose(files_of(folder, role), SERVER)


def test_one_for_servers_alone_is_not_for_nodes(folder):
    for_servers_alone(folder)
    check_purpose(files_of(folder, "coordinator"), SERVER)
    settings = build(NodeSettings, flags_of(folder, "coordinator"))
    with pytest.raises(TlsError, match="extended key usage lacks clientAuth"):
        check_network(settings)


def test_files_that_change_have_other_stamps(folder, tmp_path):
    files = files_of(folder, "node")
    before = files.stamps()
    assert files.stamps() == before
    shutil.copy(files.cert, tmp_path / "copy")
    (tmp_path / "copy").rename(files.cert)
    assert files.stamps() != before
    Path(files.cert).unlink()
    assert None in files.stamps()


@pytest.mark.parametrize("given", [{"tls_cert": "c"}, {"tls_ca": "c"}])
def test_beside_tls_nothing_is_open_to_other_machines_unless_the_network_is_trusted(given):
    check_open("this", "192.0.2.1", TlsSettings())
    check_open("this", "127.0.0.1", TlsSettings(**given))
    check_open("this", "192.0.2.1", TlsSettings(**given, trusted_network=True))
    with pytest.raises(SettingsError, match=r"this is neither .* and 192\.0\.2\.1 is not .* --trusted-network says"):
        check_open("this", "192.0.2.1", TlsSettings(**given))


def test_the_library_for_certificates_is_imported_only_with_tls():
    code = "import sys; from serving_core.net.tls import *; check_purpose(TlsFiles(), ''); print(*sys.modules)"
    assert "cryptography" not in subprocess.check_output([sys.executable, "-c", code], text=True).split()
