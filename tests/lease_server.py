"""A stand-in for the API server of Kubernetes, of Leases in one namespace alone, over TLS and with a token."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate

from tests.tls_kit import authority

NAMESPACE, TOKEN = "serving", "the account's token"
FOLDER = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
VERSION = "1.28"


class LeaseServer:
    """Leases by their names, which tests may change. A context manager."""

    def __init__(self, folder: Path) -> None:
        """`account` is a folder as the kubelet mounts it."""
        certs = authority(folder / "certs", "localhost")
        self.account = folder / "account"
        self.account.mkdir()
        for name, text in {"token": TOKEN, "namespace": NAMESPACE, "ca.crt": (certs / "ca.crt").read_text()}.items():
            (self.account / name).write_text(text)
        self.leases: dict[str, dict[str, Any]] = {}
        self.answers = threading.Event()  # clear: requests wait, and are carried out once it is set
        self.answers.set()
        self.before_write = lambda: None
        self._lock, self._num_writes = threading.RLock(), 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "coordinator.crt", certs / "coordinator.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://localhost:{self._server.server_port}"

    def __enter__(self) -> "LeaseServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    def put(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        """Write a lease, whatever was there."""
        with self._lock:
            self._num_writes += 1
            lease["metadata"] |= {"resourceVersion": str(self._num_writes), "namespace": NAMESPACE}
            self.leases[name] = lease
            return lease

    def answer(self, method: str, path: str, token: str | None, body: Any) -> tuple[int, Any]:
        """The status and the object of one request."""
        if token != f"Bearer {TOKEN}":
            return 403, _status("Forbidden")
        if not path.startswith(FOLDER):
            return 404, _status("NotFound")
        with self._lock:
            name = path.removeprefix(FOLDER).strip("/")
            known = self.leases.get(name)
            if method != "GET":
                kubernetes_validate.validate(body, VERSION, strict=True)
                self.before_write()
                known = self.leases.get(name)
            if method == "POST":
                name = body["metadata"]["name"]
                return (409, _status("AlreadyExists")) if name in self.leases else (201, self.put(name, body))
            if known is None:
                return 404, _status("NotFound")
            if method == "GET":
                return 200, known
            if body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return 409, _status("Conflict")
            return 200, self.put(name, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                server.answers.wait()
                status, value = server.answer(self.command, self.path, self.headers.get("Authorization"), body)
                text = json.dumps(value).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:
                    self.close_connection = True  # the client waits no more

            do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _status(reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
