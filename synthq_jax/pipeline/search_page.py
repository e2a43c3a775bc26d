"""Serves a page that searches, to the browser of this machine alone.

Formal guarantee: it binds to 127.0.0.1, answers only requests that name this
machine as their host (a page of another site cannot ask under its own name), and
keeps no query: what is typed may be private.
"""

import http.server
import urllib.parse
from typing import Any

from synthq_jax import extras
from synthq_jax.pipeline import search

with extras.required("run"):
  import jinja2

__all__ = ["HOST", "server"]

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_LONGEST = 1000  # characters of a query
_HEADERS = {
  "Content-Type": "text/html; charset=utf-8",
  "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
  " form-action 'self'; frame-ancestors 'none'",
  "Referrer-Policy": "no-referrer",
  "Cache-Control": "no-store",
}


def server(
  searcher: search.Searcher, *, port: int = 8000, k: int = 10, private: bool
) -> http.server.HTTPServer:
  """Returns a server of the page; `serve_forever` starts it.

  Args:
    searcher: from `search.open_run`.
    port: 0 takes a free one (`server_port`).
    k: documents of each system.
    private: whether a system is private, which the page then says.

  Raises:
    OSError: if the port is taken.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("synthq_jax", "report/templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
  )
  template = environment.get_template("search.html")

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802  (the library's name)
      asked = urllib.parse.urlsplit(self.path)
      host = self.headers.get("Host", "").rpartition(":")[0]
      if host not in _NAMES:
        self.send_error(403)
      elif asked.path != "/":
        self.send_error(404)
      else:
        given = urllib.parse.parse_qs(asked.query).get("q", [""])
        self._send(given[0][:_LONGEST])

    def _send(self, query: str) -> None:
      found = searcher.search(query, k)
      page = template.render(query=query, found=found, private=private)
      content = page.encode()
      self.send_response(200)
      for name, value in _HEADERS.items():
        self.send_header(name, value)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *told: Any) -> None:
      """Keeps nothing: a path holds the query."""

  return http.server.HTTPServer((HOST, port), Handler)
