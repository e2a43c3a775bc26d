"""Serves a search page to browsers on this machine.

Formal guarantee: the server binds to 127.0.0.1 and answers only requests whose Host
header names this machine, so a page of another site cannot ask under its own name.
A query may be private. The server stores no query, and queries are posted, so none
stands in an address, which the browser's history would keep. Posts of other sites
are refused.
"""

import http.server
import itertools
import re
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from synthq_jax import extras
from synthq_jax.report import tables
from synthq_jax.tools import search

with extras.required("run"):
  import jinja2

__all__ = ["HOST", "make_server"]

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_LONGEST = 1000  # characters of a query
_LOOKED_AT = 100  # documents searched for a title
_EXAMPLE_WORDS = 8
_MOST_BYTES = 1 << 16  # of a form
_HEADERS = {
  "Content-Type": "text/html; charset=utf-8",
  "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
  " form-action 'self'; frame-ancestors 'none'",
  "Referrer-Policy": "same-origin",  # without one a browser's Origin is "null"
  "Cache-Control": "no-store",
}


def make_server(
  searcher: search.Searcher, *, port: int = 8000, k: int = 10, private: bool
) -> http.server.HTTPServer:
  """Makes the HTTP server of the search page; `serve_forever` starts it.

  Args:
    searcher: a system from `search.open_run`.
    port: port to bind; 0 for a free one, which `server_port` then holds.
    k: largest number of documents on a page.
    private: whether the page says that the system is private.

  Raises:
    OSError: if the port is taken.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("synthq_jax", "report/templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
  )
  template = environment.get_template("search.html")
  searching = threading.Lock()
  example = _choose_example(searcher.documents)

  class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10  # seconds; an unfinished post must not block its thread

    def do_GET(self):  # noqa: N802  (the library's name)
      if self._is_allowed():
        self._send("")

    def do_POST(self):  # noqa: N802
      length = self.headers.get("Content-Length", "")
      if not re.fullmatch(r"\d{1,9}", length) or int(length) > _MOST_BYTES:
        self.send_error(413)
        return
      form = self.rfile.read(int(length)).decode(errors="replace")
      if self._is_allowed():
        values = urllib.parse.parse_qs(form).get("q", [""])
        self._send(values[0][:_LONGEST])

    def _is_allowed(self) -> bool:
      """Tests whether to answer; sends an error to other sites and other paths."""
      host = self.headers.get("Host", "")
      origin = self.headers.get("Origin", f"http://{host}")
      if host.partition(":")[0] not in _NAMES or origin != f"http://{host}":
        self.send_error(403)
      elif self.path != "/":
        self.send_error(404)
      else:
        return True
      return False

    def _send(self, query: str) -> None:
      with searching:
        hits = searcher.search(query, k)
      page = template.render(
        name=str(searcher.row),
        title=tables.call_row(searcher.row),
        count=len(searcher.documents),
        example=example,
        query=query,
        hits=hits,
        private=private,
      )
      content = page.encode()
      self.send_response(200)
      for name, value in _HEADERS.items():
        self.send_header(name, value)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, format: str, *told: Any) -> None:
      """Logs nothing: a request may hold a private query."""

  # One thread a connection: browsers open some that stay silent for a while.
  http_server = http.server.ThreadingHTTPServer((HOST, port), Handler)
  http_server.daemon_threads = True
  return http_server


def _choose_example(documents: Sequence[Mapping[str, str]]) -> str:
  """Returns an example query for the page: first words of a public document.

  Formal guarantee: a function of the public documents alone.
  """
  some = itertools.islice(documents, _LOOKED_AT)
  texts = [
    (document["title"].strip(), document["text"].strip()) for document in some
  ]
  titles = (title for title, _ in texts if title)
  text = next(titles, next((text for _, text in texts if text), ""))
  return " ".join(text.split()[:_EXAMPLE_WORDS])
