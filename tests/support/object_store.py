"""An object store for tests: moto's server in its own process, behind a proxy that can break requests.

`serve_objects` starts both. The fixture `bucket` of tests/conftest.py gives each test a bucket.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# The kernel chooses the port, and the server prints it.
_SERVER = """
from megatron.child_processes import end_with_parent
end_with_parent()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
server._thread.join()
"""
_ROOT = Path(__file__).parents[2]

Action = Callable[["Exchange"], None]


@dataclass(frozen=True)
class Request:
    """A request that has arrived.

    kind: LIST, GET, HEAD, PUT or DELETE; for multipart uploads CREATE, PART, COMPLETE, ABORT or UPLOADS;
    otherwise BUCKET. key: the key in the bucket; for a listing its prefix; for a deletion its keys, one per
    line.
    """

    kind: str
    key: str


@dataclass
class _Fault:
    kind: str
    action: Action
    key: str
    first: int
    times: float
    seen: int = 0

    def matches(self, request: Request) -> bool:
        """Returns whether this request gets the action. Counts the request."""
        if request.kind not in self.kind.split("|") or not re.search(self.key, request.key):
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


@dataclass
class Bucket:
    """The bucket of a test. url: s3://BUCKET/run. environment: the variables of processes that use the
    bucket."""

    url: str
    environment: dict[str, str]
    requests: list[Request] = field(default_factory=list)
    """All requests so far, in the order of their arrival."""
    _faults: list[_Fault] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Returns the bucket's name."""
        return self.url.split("/")[2]

    def count(self, kind: str = "") -> int:
        """Returns the number of requests of a kind (default: of all kinds) that have arrived."""
        return sum(not kind or request.kind == kind for request in self.requests)

    def counts(self) -> Counter[str]:
        """Returns the number of requests by kind."""
        return Counter(request.kind for request in self.requests)

    def fault(self, kind: str, action: Action, *, key: str = "", first: int = 1, times: float = 1) -> None:
        """From now on, executes an action instead of answering certain requests. kind: one kind, or several,
        joined by |. key: a regular expression. The fault affects the requests whose kind and key match, from
        number `first` on, `times` requests in all."""
        self._faults.append(_Fault(kind, action, key, first, times))

    def heal(self) -> None:
        """Removes all faults, and forgets the requests so far."""
        self._faults.clear()
        self.requests.clear()

    def arrived(self, request: Request) -> Action | None:
        """Records a request. Returns the action that breaks it, or None."""
        self.requests.append(request)
        found = [fault.action for fault in [*self._faults] if fault.matches(request)]
        return found[0] if found else None


def answer(status: int, code: str = "") -> Action:
    """Returns an action that answers with an error, such as 503 SlowDown, without carrying out the
    request."""

    def act(exchange: Exchange) -> None:
        body = f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()
        exchange.send(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)

    return act


def refuse(exchange: Exchange) -> None:
    """Resets the connection without carrying out the request."""
    exchange.reset()


def lose_answer(exchange: Exchange) -> None:
    """Carries out the request, then resets the connection instead of answering."""
    exchange.forward()
    exchange.reset()


def cut_after(num_bytes: int) -> Action:
    """Returns an action that resets the connection after `num_bytes` bytes of the answer's body."""

    def act(exchange: Exchange) -> None:
        status, headers, body = exchange.forward()
        assert len(body) > num_bytes
        exchange.send(status, headers, body[:num_bytes])
        exchange.reset()

    return act


def small_pages(size: int) -> Action:
    """Returns an action that answers a listing with at most `size` objects."""

    def act(exchange: Exchange) -> None:
        exchange.path += f"&max-keys={size}"
        exchange.send(*exchange.forward())

    return act


def first_upload_only(exchange: Exchange) -> None:
    """Answers a listing of uploads with only the first one, as a server does with more than 1,000 uploads."""
    status, headers, body = exchange.forward()
    uploads = re.findall(rb"<Upload>.*?</Upload>", body, re.DOTALL)
    for upload in uploads[1:]:
        body = body.replace(upload, b"")
        body = body.replace(b"<IsTruncated>false", b"<IsTruncated>true")
    exchange.send(status, [pair for pair in headers if pair[0].lower() != "content-length"], body)


def hang(exchange: Exchange) -> None:
    """Leaves a request without an answer."""
    exchange.wait_for_end()


def kill_sender(*, is_done: bool) -> Action:
    """Returns an action that kills the process that sent the request with SIGKILL. is_done: whether the
    request is carried out first."""

    def act(exchange: Exchange) -> None:
        if is_done:
            exchange.forward()
        os.kill(exchange.sender(), signal.SIGKILL)
        exchange.reset()

    return act


class Exchange(BaseHTTPRequestHandler):
    """One connection to the proxy, and the request on it that is being served."""

    protocol_version = "HTTP/1.1"
    server: _Proxy

    def setup(self) -> None:
        """Sends parts of an answer at once. Nagle's algorithm would wait 40 ms for the client."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _serve(self) -> None:
        # The whole body is read first. If the client is killed while it sends, the request never arrives.
        if "Transfer-Encoding" in self.headers:
            self.send_error(411)
            return
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if len(self.body) < length:
            self.close_connection = True
            return
        bucket, request = self._parse()
        with self.server.lock:
            action = self.server.buckets[bucket].arrived(request) if bucket in self.server.buckets else None
        if action:
            action(self)
        else:
            self.send(*self.forward())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _parse(self) -> tuple[str, Request]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        prefix = query.get("prefix", [""])[0]
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", self.body.decode())
            return bucket, Request("DELETE", "\n".join(keys))
        if self.command == "GET" and not key:
            return bucket, Request("UPLOADS" if "uploads" in query else "LIST", prefix)
        if not key:
            return bucket, Request("BUCKET", "")
        if self.command == "POST":
            return bucket, Request("CREATE" if "uploads" in query else "COMPLETE", key)
        multipart = {"PUT": "PART", "DELETE": "ABORT"}
        kind = multipart[self.command] if "uploadId" in query else self.command
        return bucket, Request(kind, key)

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Forwards the request to the server. Returns the server's answer: status, headers, body."""
        backend = HTTPConnection("127.0.0.1", self.server.backend_port)
        try:
            backend.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    backend.putheader(name, value)
            backend.endheaders(self.body)
            reply = backend.getresponse()
            body = reply.read()
            dropped = ("connection", "transfer-encoding", "date", "server")
            headers = [pair for pair in reply.getheaders() if pair[0].lower() not in dropped]
            return reply.status, headers, body
        finally:
            backend.close()

    def send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Sends an answer or its beginning. The headers state its full length."""
        self.send_response(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """Ends the connection with RST, as a crashed machine does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # The socket stays open as long as a file refers to it.
        self.rfile.close()
        self.connection.close()
        self.close_connection = True

    def wait_for_end(self) -> None:
        """Waits until the proxy is closed."""
        self.close_connection = True
        self.server.is_closed.wait()

    def sender(self) -> int:
        """Returns the id of the process at the other end of the connection."""
        inode = _socket_inode(self.client_address[1], self.server.server_port)
        for entry in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(entry) == f"socket:[{inode}]":
                    return int(entry.parts[2])
            except OSError:
                continue
        raise AssertionError("no process holds the other end of the connection")

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _socket_inode(local_port: int, remote_port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        ports = tuple(int(address.rpartition(":")[2], 16) for address in columns[1:3])
        if ports == (local_port, remote_port):
            return columns[9]
    raise AssertionError(f"no connection from port {local_port} to {remote_port}")


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, backend_port: int) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.backend_port = backend_port
        self.buckets: dict[str, Bucket] = {}
        self.lock = threading.Lock()
        self.is_closed = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing when the client or a fault has ended the connection."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, ValueError, OSError)):
            super().handle_error(request, client_address)


class ObjectStoreServer:
    """Moto's server and the proxy in front of it."""

    def __init__(self, proxy: _Proxy) -> None:
        self._proxy = proxy
        self._num_buckets = 0
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            # The machine's own settings are not used.
            **{"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull},
            **{"AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        }

    def new_bucket(self) -> Bucket:
        """Makes an empty bucket without faults."""
        self._num_buckets += 1
        name = f"bucket-{self._num_buckets}"
        connection = HTTPConnection("127.0.0.1", self._proxy.backend_port)
        connection.request("PUT", f"/{name}", headers={"Host": "127.0.0.1"})
        assert connection.getresponse().status == 200
        connection.close()
        bucket = self._proxy.buckets[name] = Bucket(f"s3://{name}/run", dict(self.environment))
        return bucket


@contextmanager
def serve_objects() -> Iterator[ObjectStoreServer]:
    """Runs the server and the proxy while the block runs."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=_ROOT
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline() or 0)
        assert port, "moto's server did not start: pip install 'moto[s3]' flask flask-cors"
        with _Proxy(port) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            yield ObjectStoreServer(proxy)
            proxy.is_closed.set()
            proxy.shutdown()
    finally:
        server.kill()
        server.wait()
