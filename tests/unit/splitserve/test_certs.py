"""`splitserve certs`: what it writes is taken by OpenSSL's own verification, as Python has it, and kept from others."""

import socket
import ssl
import stat
import threading

import pytest
from click.testing import CliRunner
from cryptography import x509

from serving_core.net.tls import read_tls
from splitserve.cli import main
from tests.tls_kit import files_of, serial_of

DEADLINE_S = 60.0
ROLES = ("coordinator", "node", "client")


def certs(folder, *arguments):
    return CliRunner().invoke(main, ["certs", "--out", str(folder), *arguments])


def contexts(server, client):
    """Of two roles that check each other."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.verify_mode = ssl.CERT_REQUIRED
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, files in ((ours, server), (theirs, client)):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.cert, files.key)
    return ours, theirs


def shake_hands(server, client, name):
    """Both ends of a handshake by their files, over a pair of sockets. Raises ssl.SSLError."""
    ours, theirs = contexts(server, client)
    left, right = socket.socketpair()
    problems = []

    def serve():
        try:
            with ours.wrap_socket(left, server_side=True) as connection:
                connection.sendall(b"!")
        except OSError as problem:
            problems.append(problem)
            left.close()

    for end in (left, right):
        end.settimeout(DEADLINE_S)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with theirs.wrap_socket(right, server_hostname=name) as connection:
            connection.recv(1)
    finally:
        right.close()
        thread.join()
    if problems:
        raise problems[0]


@pytest.fixture
def folder(tmp_path):
    done = certs(tmp_path / "certs", "--host", "coordinator", "--host", "192.0.2.7", "--host", "fd00::7")
    assert done.exit_code == 0, done.output
    return tmp_path / "certs"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "coordinator", "192.0.2.7", "fd00::7"])
def test_the_coordinator_is_known_by_every_name(folder, name):
    shake_hands(files_of(folder, "coordinator"), files_of(folder, "node"), name)


def test_by_no_other_name_and_by_no_other_ca(folder, tmp_path):
    coordinator, node = files_of(folder, "coordinator"), files_of(folder, "node")
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'other'"):
        shake_hands(coordinator, node, "other")
    certs(tmp_path / "others")
    with pytest.raises(ssl.SSLError, match=r"verify failed|unknown ca"):
        shake_hands(coordinator, files_of(tmp_path / "others", "node"), "localhost")


def test_a_node_and_a_client_cannot_stand_in_for_the_coordinator(folder):
    for role in ("node", "client"):
        with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
            shake_hands(files_of(folder, role), files_of(folder, "client"), "localhost")


def test_keys_are_for_their_owner_alone(folder):
    assert {path.name for path in folder.iterdir()} == {
        f"{role}.{end}" for role in ("ca", *ROLES) for end in ("crt", "key")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for role in ROLES:
        read_tls(files_of(folder, role))


def test_the_ca_stays_and_signs_again(folder):
    before = {role: serial_of(folder / f"{role}.crt") for role in ("ca", *ROLES)}
    done = certs(folder, "--days", "7")
    assert "The CA that was there has signed them for 7 days" in done.output
    after = {role: serial_of(folder / f"{role}.crt") for role in ("ca", *ROLES)}
    assert after["ca"] == before["ca"]
    assert not {after[role] for role in ROLES} & set(before.values())
    for name in ("localhost", "coordinator", "192.0.2.7", "fd00::7"):
        shake_hands(files_of(folder, "coordinator"), files_of(folder, "node"), name)
    certificate = x509.load_pem_x509_certificate((folder / "node.crt").read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 7


def test_a_name_more_is_one_beside_those_before(folder):
    certs(folder, "--host", "other.example")
    for name in ("localhost", "coordinator", "192.0.2.7", "other.example"):
        shake_hands(files_of(folder, "coordinator"), files_of(folder, "node"), name)


def test_no_certificate_outlives_its_ca(folder, tmp_path):
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = certs(folder, "--days", "4000")
    message = f"--days 4000 is beyond the end of the CA in {folder}, {authority.not_valid_after_utc:%Y-%m-%d}"
    assert (done.exit_code, done.output) == (2, f"Error: {message}\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert certs(tmp_path / "new", "--days", "4000").exit_code == 0


def test_it_says_what_each_is_for(folder):
    output = certs(folder).output
    assert f"nodes:       --tls-cert {folder}/node.crt --tls-key {folder}/node.key --tls-ca {folder}/ca.crt\n" in output


def test_what_cannot_be_done_is_a_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for host in ("ä", "", "10.0.0.1:50051", "coordinator:50051", "https://coordinator", "a b", "10.0.0.0/8"):
        done = certs(tmp_path / "a", "--host", host)
        assert done.exit_code == 2
        assert f"--host {host!r} is neither an address nor a name in ASCII, with no port" in done.output
    assert not (tmp_path / "a").exists()
    assert "'--out': Directory" in certs(tmp_path / "file").output
    assert "Not a directory" in certs(tmp_path / "file" / "below").output
    (folder / "ca.key").unlink()
    done = certs(folder)
    assert (done.exit_code, done.output) == (
        2,
        f"Error: the CA in {folder} cannot sign: --tls-key {folder}/ca.key cannot be read: No such file or directory\n",
    )
