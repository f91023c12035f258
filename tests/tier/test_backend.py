"""The start-up self-check: what a backend must do, and the typed error of one that does not."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.tier.conftest import PATIENT, TABLE, Sidecar
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, Unsupported
from trace_store.storage.s3 import CredentialsRefused, ObjectExists, ObjectStore
from trace_store.storage.selfcheck import bucket_identity, check_backend


def test_seaweedfs_and_a_directory_do_all_that_is_needed(store: ObjectStore, tmp_path: Path) -> None:
    for backend in (store, ObjectStore(f"file://{tmp_path}/objects")):
        assert check_backend(backend).create_once
        assert list(backend.listing("")) == []  # the check cleans up
        assert bucket_identity(backend) == bucket_identity(backend)


def test_a_create_of_a_taken_name_fails_and_changes_nothing(store: ObjectStore) -> None:
    store.put("name", b"first")
    with pytest.raises(ObjectExists):
        store.put("name", b"second")
    assert bytes(store.read("name", 0, 10)) == b"first"


def test_a_wrong_secret_is_refused_at_once(
    store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialsRefused, match="refuses the credentials"):
        Engine(tmp_path, objects=ObjectStore(url, PATIENT))
    assert list(store.listing("")) == []


def test_a_store_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{held.getsockname()[1]}")
        monkeypatch.setattr("trace_store.tier.joining.START_WAIT_S", 0.0)
        with pytest.raises(OSError, match=re.escape(url)):
            Engine(tmp_path, objects=ObjectStore(url, PATIENT))


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "gs://bucket", "bucket", "", "http://host/bucket"])
def test_urls_that_are_no_store_of_ours_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        ObjectStore(url)


class BadBackend(BaseHTTPRequestHandler):
    """A small S3 server in memory with one fault. Signatures are not looked at."""

    fault = ""
    objects: dict[str, bytes]
    requests: list[str]

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._is_busy():
            return
        if self.headers.get("If-None-Match") == "*" and self.path in self.objects and self.fault != "no create-once":
            self._answer(412)
            return
        self.objects[self.path] = body
        self._answer(200, ETag='"x"')

    def _is_busy(self) -> bool:
        """With fault ``throttled`` two of three requests are put off."""
        self.requests.append(self.path)
        busy = self.fault == "throttled" and len(self.requests) % 3 != 0
        if busy:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        return busy

    def do_GET(self) -> None:
        if self._is_busy():
            return
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if "list-type" in query:
            self._list(parts.path, query["prefix"][0])
            return
        content = self.objects.get(parts.path)
        if content is None:
            self._answer(404)
            return
        stamp = {"ETag": '"x"', "Last_Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or self.fault == "whole object for a range":
            self._answer(200, content, **stamp)
            return
        low, high = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        shift = 1 if self.fault == "other bytes for a range" else 0
        part = content[low - shift : high - shift]
        self._answer(206, part, Content_Range=f"bytes {low}-{high - 1}/{len(content)}", **stamp)

    def do_HEAD(self) -> None:
        content = self.objects.get(self.path)
        if content is None:
            self._answer(404)
        else:
            modified = "Mon, 30 Nov 2026 00:00:00 GMT"
            self._answer(200, Content_Length=str(len(content)), ETag='"x"', Last_Modified=modified)

    def do_DELETE(self) -> None:
        if self.fault != "keeps deleted objects":
            self.objects.pop(self.path, None)
        self._answer(204)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = re.findall(r"<Key>(.*?)</Key>", body)
        for name in names if self.fault != "keeps deleted objects" else ():
            self.objects.pop(f"{urlsplit(self.path).path.rstrip('/')}/{name}", None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _list(self, bucket: str, prefix: str) -> None:
        names = [path.removeprefix(f"{bucket.rstrip('/')}/") for path in self.objects]
        shown = [name for name in names if name.startswith(prefix) and self.fault != "empty listing"]
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self.objects[f'/bad/{name}'])}</Size><ETag>x</ETag>"
            "<LastModified>2026-11-30T00:00:00.000Z</LastModified></Contents>"
            for name in shown
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def bad_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BadBackend]]:
    """The handler's class: set its ``fault``."""
    handler = type("Handler", (BadBackend,), {"objects": {}, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "fault", ["whole object for a range", "other bytes for a range", "empty listing", "keeps deleted objects"]
)
def test_a_backend_that_lies_is_refused(bad_backend: type[BadBackend], fault: str, tmp_path: Path) -> None:
    bad_backend.fault = fault
    with pytest.raises(Unsupported, match="the object store"):
        Engine(tmp_path, objects=ObjectStore("s3://bad/prefix", PATIENT))


def test_a_throttling_backend_gets_everything_in_the_end(
    bad_backend: type[BadBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_store.tier.uploader.BACKOFF_FIRST_S", 0.02)
    first = Sidecar(tmp_path / "a", "s3://bad/prefix", "a", None, PATIENT)
    second = None
    try:
        bad_backend.fault = "throttled"
        for number in range(3):
            first.write(f"t{number}", partition=f"step-{number}")
        first.upload()
        assert first.tier.status().upload_failures > 0
        bad_backend.fault = ""
        second = Sidecar(tmp_path / "b", "s3://bad/prefix", "b", None, PATIENT)
        bad_backend.fault = "throttled"
        for number in range(3):
            assert second.read(f"t{number}", partition=f"step-{number}") == first.read(
                f"t{number}", partition=f"step-{number}"
            )
    finally:
        bad_backend.fault = ""
        for item in filter(None, (first, second)):
            item.engine.close()


def test_a_backend_without_create_once_is_used_with_a_look_first(bad_backend: type[BadBackend], tmp_path: Path) -> None:
    bad_backend.fault = "no create-once"
    sidecar = Sidecar(tmp_path, "s3://bad/prefix", "a", None, PATIENT)
    try:
        assert not sidecar.tier.capabilities.create_once
        sidecar.write("t")
        (path,) = tmp_path.glob("runs/*/*/*.open")
        taken = f"/bad/prefix/runs/{path.parent.parent.name}/{path.parent.name}/{path.stem}.arrow"
        bad_backend.objects[taken] = b"somebody else's"
        sidecar.engine.roll().result(30)
        from tests.tier.conftest import eventually

        eventually(lambda: sidecar.tier.tick() or sidecar.tier.status().upload_conflicts, "conflict")
        assert bad_backend.objects[taken] == b"somebody else's"
        assert sidecar.engine.sites("run") == TABLE
    finally:
        sidecar.engine.close()
