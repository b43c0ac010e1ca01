"""A hub on 127.0.0.1: the calls that an upload and a download make, with files in memory."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

COMMIT = "0" * 40


class Hub:
    """Keeps the files of repositories, and the title of each commit; use it as a context."""

    def __init__(self):
        self.files = {}
        self.commits = []
        self.private = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                hub.answer(self, is_head=False)

            def do_HEAD(self):
                hub.answer(self, is_head=True)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.post(self, body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def post(self, request, body):
        path = request.path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.files.setdefault(name, {})
            self.private.setdefault(
                name, asked.get("visibility") == "private" or bool(asked.get("private"))
            )
            send(request, {"url": f"{self.address}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            header = yaml.safe_load(text.split("---")[1])  # the hub refuses a card without it
            assert isinstance(header, dict)
            send(request, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            asked = json.loads(body)["files"]
            regular = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in asked
            ]
            send(request, {"files": regular})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "header":
                    self.commits.append((name, part["value"]["summary"]))
                elif part["key"] == "file":
                    content = base64.b64decode(part["value"]["content"])
                    self.files[name][part["value"]["path"]] = content
            answer = {"commitUrl": f"{self.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            send(request, {**answer, "hookOutput": "", "success": True})
        else:
            send(request, {"error": path}, status=404)

    def answer(self, request, *, is_head):
        path = request.path.partition("?")[0]
        if "/resolve/" in path:
            name, _, rest = path[1:].partition("/resolve/")
            content = self.files.get(name, {}).get(rest.partition("/")[2])
            if content is None:
                missing = "EntryNotFound" if name in self.files else "RepoNotFound"
                send(request, {"error": missing}, status=404, is_head=is_head, code=missing)
                return
            send(request, content, is_head=is_head, etag=hashlib.sha1(content).hexdigest())
            return
        name = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")[0]
        if name not in self.files:
            send(request, {"error": path}, status=404, is_head=is_head, code="RepoNotFound")
        elif "/tree/" in path:
            rows = [
                {"type": "file", "path": file, "size": len(c), "oid": COMMIT}
                for file, c in self.files[name].items()
            ]
            send(request, rows, is_head=is_head)
        else:
            siblings = [{"rfilename": file} for file in self.files[name]]
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            send(request, {**info, "private": bool(self.private[name])}, is_head=is_head)


def send(request, content, *, status=200, is_head=False, etag="", code=""):
    """Answer with bytes, or with a value as JSON."""
    is_bytes = isinstance(content, bytes)
    body = content if is_bytes else json.dumps(content).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("X-Repo-Commit", COMMIT)
    request.send_header(
        "Content-Type", "application/octet-stream" if is_bytes else "application/json"
    )
    if etag:
        request.send_header("ETag", f'"{etag}"')
    if code:
        request.send_header("X-Error-Code", code)
    request.end_headers()
    if not is_head:
        request.wfile.write(body)
