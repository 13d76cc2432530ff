"""The explorer behind a local address: 127.0.0.1 alone, under a path that nobody can guess. Imports no torch."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from gape.explore.export import MODULES, asset, page
from gape.explore.view import View, default_heads, parsed_heads
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.explore.exploration import Exploration

HOST = "127.0.0.1"
_POLICY = "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_HTML, _BINARY = "text/html; charset=utf-8", "application/octet-stream"


class Explorer(ThreadingHTTPServer):
    """Serves the page of one view at `url`; `serve_forever` runs it, and a signal ends it at once.

    `exploration` computes finer maps; None serves what the view has. Port 0 takes a free one; one that is taken, or
    needs other rights, is refused.
    """

    daemon_threads = True
    # Waiting for threads would keep a signal from ending the command while a tile is computed.
    block_on_close = False

    def __init__(self, view: View, exploration: Exploration | None = None, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise invalid_argument("port", port, f"a port that is free and may be used, or 0 ({error})") from error
        self.view, self.exploration, self.token = view, exploration, secrets.token_urlsafe(24)
        # What the page may ask for besides; an exported view has nobody to ask.
        self._data = View({**view.header, "live": exploration is not None}, view.arrays).to_bytes()
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.url = f"http://{HOST}:{self.server_port}/{self.token}/"

    def answer(self, path: str, query: dict[str, str]) -> tuple[bytes, str]:
        """Body and type of what lies at a path behind the token; a KeyError where nothing does."""
        if path in MODULES or path == "style.css":
            return asset(path).encode(), _TYPES[path[path.rindex(".") :]]
        match path:
            case "":
                text = asset("index.html").replace("TITLE", "gape explore")
                text = text.replace("<!-- HEAD -->", '<link rel="stylesheet" href="style.css">')
                return text.replace("<!-- END -->", '<script type="module" src="main.js"></script>').encode(), _HTML
            case "view":
                return self._data, _BINARY
            case "export":
                sizes = self.view.header["model"]
                heads = parsed_heads(query.get("heads", ""), sizes["layers"], sizes["n_heads"])
                return page(self.view, self.exploration, default_heads(self.view.header) or heads).encode(), _HTML
            case "tile" | "row" if self.exploration is not None:
                names = ("layer", "head", "level", "row", "column") if path == "tile" else ("layer", "head", "query")
                compute = self.exploration.tile if path == "tile" else self.exploration.row
                return compute(query["kind"], *(int(query[name]) for name in names)).tobytes(), _BINARY
        raise KeyError(path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for those who know the token, from a page of this server alone."""

    server: Explorer
    server_version, sys_version = "gape", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # A name that an attacker makes point here would come with a Host of its own.
        if self.headers.get("Host") not in self.server.hosts:
            expected = " or ".join(sorted(self.server.hosts))
            message = f"this server answers for {expected} alone; a port that is forwarded has to be the same\n"
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, message.encode())
        try:
            self._answer(urlsplit(self.path))
        except KeyError:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing here\n")
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        except (RuntimeError, MemoryError) as error:
            # A device or machine without room for a tile: the page shows what it has.
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode())

    def _answer(self, parts: SplitResult) -> None:
        token, _, rest = parts.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(HTTPStatus.FORBIDDEN, b"the address lacks its token; take it from the terminal\n")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        body, kind = self.server.answer(rest, query)
        name = {"Content-Disposition": 'attachment; filename="gape-explore.html"'} if rest == "export" else {}
        return self._send(HTTPStatus.OK, body, kind, name)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.send_response(status)
        fixed = {
            "Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": _POLICY,
            "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        for name, value in (fixed | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the token is in every path."""


def serve(server: Explorer, opened: Callable[[str], Any] = lambda url: None) -> None:
    """Run a server until a signal ends the command; `opened` is called with the address once it answers."""
    opened(server.url)
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()
