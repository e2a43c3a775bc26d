"""A store that is no file system: one dict behind an HTTP server of this machine.

Objects are whole or not there, have an MD5 and no mode; there are no folders,
locks or renames. It outlives the processes that use it, also kill -9 of them.

  python tests/shared/loop_store.py run --workdir=loop://127.0.0.1:PORT/b/run

is `synthq` with this file system.
"""

import contextlib
import hashlib
import http.client
import http.server
import json
import pathlib
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import fsspec
from fsspec import spec

LEASE = 2.0
"""Seconds, of the tests."""


class Server(http.server.ThreadingHTTPServer):
  """Objects by path; `log` has every change, in order, as "PUT path"."""

  daemon_threads = True
  # Sixteen threads of a client at once; with the default of 5, Linux resets some.
  request_queue_size = 128

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.objects: dict[str, bytes] = {}
    self.log: list[str] = []
    self.guard = threading.Lock()
    self.is_down = False

  def handle_error(self, request, client_address):
    """A client that was killed is no news."""

  @property
  def url(self) -> str:
    return f"loop://127.0.0.1:{self.server_port}"

  def put(self, below: str, path: pathlib.Path) -> str:
    """Has a file, or the files of a folder, in the store; returns the URL."""
    for file in path.rglob("*") if path.is_dir() else [path]:
      if file.is_file():
        name = file.relative_to(path.parent).as_posix()
        self.objects[f"/{below}/{name}"] = file.read_bytes()
    return f"{self.url}/{below}/{path.name}"

  def names(self, below: str) -> list[str]:
    """The objects below a bucket's folder, by the rest of their paths."""
    return [
      n[len(below) :] for n in sorted(self.objects) if n.startswith(below)
    ]


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def do_GET(self):
    self._answer(self._get)

  def do_PUT(self):
    self._answer(self._put)

  def do_DELETE(self):
    self._answer(self._delete)

  def log_message(self, *words):
    del words

  def _answer(self, act):
    size = int(self.headers.get("Content-Length", 0))
    body = self.rfile.read(size)
    if len(body) < size:  # of a process that was killed: nothing was put
      return
    path = urllib.parse.unquote(self.path)
    with self.server.guard:
      code, content = (503, b"") if self.server.is_down else act(path, body)
    self.send_response(code)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def _get(self, path, body):
    objects = self.server.objects
    if path.startswith("/?"):
      found = {
        name: [len(content), hashlib.md5(content).hexdigest()]
        for name, content in objects.items()
        if name.startswith(path[2:])
      }
      return 200, json.dumps(found).encode()
    return (200, objects[path]) if path in objects else (404, b"")

  def _put(self, path, body):
    if self.headers.get("If-None-Match") and path in self.server.objects:
      return 412, b""
    self.server.objects[path] = body
    self.server.log.append(f"PUT {path}")
    return 200, b""

  def _delete(self, path, body):
    if self.server.objects.pop(path, None) is None:
      return 404, b""
    self.server.log.append(f"DELETE {path}")
    return 200, b""


class LoopFileSystem(spec.AbstractFileSystem):
  """What fsspec calls a file system: host:port/bucket/name."""

  protocol = "loop"

  def _ask(self, method, path, body=None, **headers):
    host, slash, name = self._strip_protocol(path).partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    with contextlib.closing(connection):
      place = urllib.parse.quote(slash + name, safe="/?")
      connection.request(method, place, body, headers)
      answer = connection.getresponse()
      content = answer.read()
    if answer.status == 404:
      raise FileNotFoundError(path)
    if answer.status == 412:
      raise FileExistsError(path)
    if answer.status != 200:
      raise RuntimeError(f"the store answers {answer.status}")
    return content

  def find(self, path, detail=False, **kwargs):
    host, _, name = self._strip_protocol(path).partition("/")
    found = json.loads(self._ask("GET", f"{host}/?/{name}"))
    found = {
      f"{host}{key}": {"type": "file", "size": size, "ETag": tag}
      for key, (size, tag) in found.items()
      if key == f"/{name}" or key.startswith(f"/{name}/")
    }
    return found if detail else list(found)

  def cat_file(self, path, start=None, end=None, **kwargs):
    return self._ask("GET", path)[start:end]

  def get_file(self, rpath, lpath, **kwargs):
    pathlib.Path(lpath).write_bytes(self._ask("GET", rpath))

  def put_file(self, lpath, rpath, **kwargs):
    self._ask("PUT", rpath, pathlib.Path(lpath).read_bytes())

  def pipe_file(self, path, value, mode="overwrite", **kwargs):
    headers = {"If-None-Match": "*"} if mode == "create" else {}
    self._ask("PUT", path, value, **headers)

  def rm_file(self, path):
    self._ask("DELETE", path)


def register() -> None:
  fsspec.register_implementation("loop", LoopFileSystem, clobber=True)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
  """Starts a store, which is empty."""
  register()
  server = Server()
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


if __name__ == "__main__":
  from synthq_jax.cli import main

  register()
  sys.exit(main.main())
