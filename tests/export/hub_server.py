"""A small Hub on the loopback interface: what the real client asks of it when a repository is made, filled and read.

State is in the open (`users`, `repos`, `blobs`), every request is in `log`, and `fail` makes the next ones go wrong.
Files from LFS_FROM bytes on go the LFS way, and are stored under links that carry a signature, as real ones do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 50_000
SIGNATURE = "X-Amz-Signature=5ca1ab1e5ca1ab1e5ca1ab1e"


@dataclass
class Repo:
    owner: str
    private: bool
    branches: dict[str, list[tuple[str, str, dict[str, bytes]]]] = field(default_factory=dict)  # (sha, message, files)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> str:
        past = self.branches.setdefault(branch, [])
        sha = hashlib.sha1(f"{self.owner}{branch}{len(past)}{message}{sorted(files)}".encode()).hexdigest()
        past.append((sha, message, files))
        return sha

    def at(self, revision: str) -> tuple[str, str, dict[str, bytes]] | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for past in self.branches.values() for c in past if c[0] == revision), None)


@dataclass
class Fault:
    pattern: str  # of "METHOD /path"
    status: int | str  # an HTTP status, "cut" (inside the request), or "lost" (done, but the answer is not sent)
    left: float
    message: str


class Answer(Exception):
    """An answer other than 200 with JSON."""

    def __init__(self, status: int, error: str = "", code: str = "", body: bytes = b"", headers: dict | None = None):
        self.status, self.error, self.code, self.body, self.headers = status, error, code, body, headers or {}


class Hub:
    """The server's state. users: token -> {name, orgs, role}."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {}
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.log: list[str] = []
        self.bodies: list[bytes] = []  # of the requests
        self.faults: list[Fault] = []
        self.waits: list[float] = []  # seconds that the client would have waited, where the test takes its sleep away
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add_repo(self, name: str, private: bool = True, files: dict[str, bytes] | None = None) -> Repo:
        repo = self.repos[name] = Repo(name.split("/")[0], private)
        repo.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})})
        return repo

    def fail(self, pattern: str, status: int | str, times: float = float("inf"), message: str = "") -> None:
        self.faults.append(Fault(pattern, status, times, message))

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What a clone of the branch has, .gitattributes aside."""
        found = self.repos[name].branches[branch][-1][2]
        return {path: data for path, data in found.items() if path != ".gitattributes"}

    def messages(self, name: str, branch: str = "main") -> list[str]:
        return [message for _, message, _ in self.repos[name].branches[branch]]

    def asked(self, pattern: str) -> list[str]:
        return [line for line in self.log if re.search(pattern, line)]

    # ------------------------------------------------------------------------------------------- who may what

    def user(self, headers: Any) -> dict[str, Any] | None:
        token = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in self.users:
            raise Answer(401, "Invalid credentials in Authorization header")
        return self.users[token]

    def may_write(self, user: dict[str, Any] | None, owner: str) -> bool:
        return user is not None and user["role"] != "read" and owner in (user["name"], *user["orgs"])

    def readable(self, name: str, headers: Any) -> Repo:
        user, repo = self.user(headers), self.repos.get(name)
        if repo is None or (repo.private and (user is None or repo.owner not in (user["name"], *user["orgs"]))):
            raise Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, name: str, headers: Any) -> Repo:
        repo = self.readable(name, headers)
        if not self.may_write(self.user(headers), repo.owner):
            raise Answer(403, "Forbidden: you don't have write access to this repository")
        return repo

    # ------------------------------------------------------------------------------------------- the answers

    def whoami(self, _: Any, headers: Any, body: bytes) -> Any:
        user = self.user(headers)
        if user is None:
            raise Answer(401, "Invalid username or password.")
        orgs = [{"name": org} for org in user["orgs"]]
        token = {"displayName": "test", "role": user["role"]}
        return {"type": "user", "name": user["name"], "orgs": orgs, "auth": {"accessToken": token}}

    def create(self, _: Any, headers: Any, body: bytes) -> Any:
        asked, user = json.loads(body), self.user(headers)
        owner = asked.get("organization") or (user or {}).get("name")
        name = f"{owner}/{asked['name']}"
        if not self.may_write(user, owner):
            raise Answer(403, f"You don't have the rights to create a model under the namespace \"{owner}\"")
        if name in self.repos:
            link = json.dumps({"url": f"{self.url}/{name}"}).encode()
            raise Answer(409, "You already created this model repo", body=link)
        self.add_repo(name, asked.get("visibility") == "private")
        return {"url": f"{self.url}/{name}"}

    def info(self, found: re.Match, headers: Any, body: bytes) -> Any:
        repo = self.readable(found["repo"], headers)
        commit = repo.at(unquote(found["rev"] or "main"))
        if commit is None:
            raise Answer(404, "Invalid rev id", "RevisionNotFound")
        siblings = [{"rfilename": path} for path in sorted(commit[2])]
        return {"_id": "0", "id": found["repo"], "modelId": found["repo"], "private": repo.private, "sha": commit[0],
                "siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "gated": False}  # fmt: skip

    def auth_check(self, found: re.Match, headers: Any, body: bytes) -> Any:
        self.writable(found["repo"], headers) if found["write"] else self.readable(found["repo"], headers)
        return {}

    def validate_yaml(self, _: Any, headers: Any, body: bytes) -> Any:
        import yaml

        text = json.loads(body)["content"].split("---\n")[1]
        if not isinstance(yaml.safe_load(text), dict):
            raise Answer(400, body=b'{"errors": [{"message": "no mapping"}]}')
        return {"errors": [], "warnings": []}

    def branch(self, found: re.Match, headers: Any, body: bytes) -> Any:
        repo, name = self.writable(found["repo"], headers), unquote(found["rev"])
        if name in repo.branches:
            raise Answer(409, "Reference already exists")
        repo.branches[name] = list(repo.branches["main"])
        return {}

    def preupload(self, found: re.Match, headers: Any, body: bytes) -> Any:
        there = self.writable(found["repo"], headers).at(unquote(found["rev"]))
        if there is None:
            raise Answer(404, "Invalid rev id", "RevisionNotFound")
        out = []
        for file in json.loads(body)["files"]:
            lfs, old = file["size"] >= LFS_FROM, there[2].get(file["path"])
            oid = None if old is None else hashlib.sha256(old).hexdigest() if lfs else git_sha(old)
            mode = "lfs" if lfs else "regular"
            out.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": out}

    def lfs_batch(self, found: re.Match, headers: Any, body: bytes) -> Any:
        self.writable(found["repo"], headers)
        objects = []
        for item in json.loads(body)["objects"]:
            link = {"href": f"{self.url}/lfs/{item['oid']}?{SIGNATURE}", "header": {}}
            objects.append(item if item["oid"] in self.blobs else item | {"actions": {"upload": link}})
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, found: re.Match, headers: Any, body: bytes) -> Any:
        if hashlib.sha256(body).hexdigest() != found["oid"]:
            raise Answer(400, "digest differs")
        self.blobs[found["oid"]] = body
        return {}

    def commit(self, found: re.Match, headers: Any, body: bytes) -> Any:
        repo, branch = self.writable(found["repo"], headers), unquote(found["rev"])
        head, *rest = (json.loads(line) for line in body.splitlines())
        files = dict(repo.at(branch)[2])
        for item in rest:
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                del files[value["path"]]
        sha = repo.commit(branch, head["value"]["summary"], files)
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.url}/{found['repo']}/commit/{sha}"}

    def tree(self, found: re.Match, headers: Any, body: bytes) -> Any:
        _, _, files = self.readable(found["repo"], headers).at(unquote(found["rev"]))
        return [entry(path, data) for path, data in sorted(files.items())]

    def resolve(self, found: re.Match, headers: Any, body: bytes) -> Any:
        commit = self.readable(found["repo"], headers).at(unquote(found["rev"]))
        if commit is None:
            raise Answer(404, "Invalid rev id", "RevisionNotFound")
        if (data := commit[2].get(unquote(found["path"]))) is None:
            raise Answer(404, "Entry not found", "EntryNotFound", headers={"X-Repo-Commit": commit[0]})
        mark = {"X-Repo-Commit": commit[0], "ETag": f'"{entry("", data)["etag"]}"'}
        raise Answer(200, body=data, headers=mark)

    def no_xet(self, found: re.Match, headers: Any, body: bytes) -> Any:
        raise Answer(404, "Sorry, we can't find the page you are looking for.")


def git_sha(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    lfs = len(data) >= LFS_FROM
    sha = hashlib.sha256(data).hexdigest()
    more = {"lfs": {"oid": sha, "size": len(data), "pointerSize": 134}} if lfs else {}
    etag = sha if lfs else git_sha(data)
    return {"type": "file", "path": path, "size": len(data), "oid": git_sha(data), "etag": etag, **more}


MODEL = r"/api/models/(?P<repo>[^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable]] = [
    (r"GET /api/whoami-v2", Hub.whoami),
    (r"POST /api/repos/create", Hub.create),
    (r"POST /api/validate-yaml", Hub.validate_yaml),
    (rf"GET {MODEL}(/revision/(?P<rev>[^/]+))?", Hub.info),
    (rf"GET {MODEL}/auth-check(?P<write>/write)?", Hub.auth_check),
    (rf"POST {MODEL}/branch/(?P<rev>[^/]+)", Hub.branch),
    (rf"POST {MODEL}/preupload/(?P<rev>[^/]+)", Hub.preupload),
    (rf"POST {MODEL}/commit/(?P<rev>[^/]+)", Hub.commit),
    (rf"GET {MODEL}/tree/(?P<rev>[^/]+)", Hub.tree),
    (rf"GET {MODEL}/xet-(read|write)-token/.+", Hub.no_xet),
    (r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", Hub.lfs_batch),
    (r"PUT /lfs/(?P<oid>\w+)", Hub.lfs_put),
    (r"(GET|HEAD) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", Hub.resolve),
]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            line = f"{self.command} {url.path}"
            hub.log.append(line)
            fault = next((f for f in hub.faults if f.left > 0 and re.search(f.pattern, line)), None)
            if fault:
                fault.left -= 1
            length = int(self.headers.get("Content-Length") or 0)
            if fault and fault.status == "cut":
                self.rfile.read(length // 2)
                return self.hang_up()
            body = self.read_body(length)
            hub.bodies.append(body)
            if fault and isinstance(fault.status, int):
                return self.answer(Answer(fault.status, fault.message))
            try:
                found = self.route(line, parse_qs(url.query), body)
                answer = Answer(200, body=json.dumps(found).encode(), headers={"Content-Type": "application/json"})
            except Answer as other:
                answer = other
            if fault:  # lost
                return self.hang_up()
            self.answer(answer)

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def read_body(self, length: int) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(length)
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def route(self, line: str, query: dict, body: bytes) -> Any:
            for pattern, answer in ROUTES:
                if found := re.fullmatch(pattern, line):
                    return answer(hub, found, self.headers, body)
            raise Answer(404, f"the small Hub has no {line}")

        def answer(self, answer: Answer) -> None:
            self.send_response(answer.status)
            body = answer.body or (json.dumps({"error": answer.error}).encode() if answer.error else b"")
            names = {"X-Error-Message": answer.error, "X-Error-Code": answer.code, "Content-Length": len(body)}
            for name, value in {**names, **answer.headers}.items():
                if value != "":
                    self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    return Handler
