"""A Hub to test against: repositories in memory behind the protocol that huggingface_hub speaks, and faults on demand.

It knows commits, branches, pull requests, LFS, tokens, private and gated repositories. It is as strict as the Hub where
a client could go wrong: a commit whose parent is not the branch's head, or whose LFS objects are missing, is refused.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import threading
import time
from urllib.parse import parse_qs, unquote

import uvicorn
from hub_store import MAIN, Fault, Repo, git_hash, is_lfs

USERS = {"hf_alice": "alice", "hf_bob": "bob"}
ORGANISATIONS = {"acme": ["alice"]}


class Answer(Exception):
    """An answer that ends the handling of a request."""

    def __init__(self, status: int, body: object = None, **headers: str) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HubServer:
    """The application and its state; tests read and change `repos`, `faults`, `requests` in their own process."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.url = ""

    def reset(self) -> None:
        """Forget everything."""
        for kept in (self.repos, self.objects, self.faults, self.requests):
            kept.clear()

    def make(self, name: str, files: dict[str, bytes], **options: bool) -> Repo:
        """A repository with one commit."""
        repo = self.repos[name] = Repo(name, **options)
        repo.commit(dict(files), "initial commit", None, MAIN)
        return repo

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        path = scope.get("raw_path", scope["path"].encode()).decode().split("?")[0]
        request = f"{scope['method']} {path}"
        self.requests.append(request)
        fault = next((fault for fault in self.faults if fault.hits(request)), None)
        body = b""
        if fault is None or fault.kind != "cut":
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        if fault is not None and fault.kind == "cut":
            await self._drop(receive)
            return
        try:
            if fault is not None and fault.kind == "status":
                raise Answer(fault.status, {"error": "on demand"}, **fault.headers)
            query = parse_qs(scope["query_string"].decode())
            answer = self._handle(scope["method"], path, body, headers, query)
        except Answer as raised:
            answer = raised
        if fault is not None and fault.kind == "cut_after":
            await self._drop(receive)
            return
        await self._send(send, scope["method"], answer, fault)

    async def _drop(self, receive):
        receive.__self__.transport.abort()
        await asyncio.sleep(0.02)

    async def _send(self, send, method, answer, fault):
        body = answer.body
        if fault is not None and fault.kind == "corrupt" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers = {"content-length": str(len(body)), **{k.lower(): v for k, v in answer.headers.items()}}
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        if method == "HEAD":
            body = b""
        if fault is not None and fault.kind == "cut_body":
            await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            return  # the connection is closed, since less was sent than announced
        await send({"type": "http.response.body", "body": body})

    # -- the protocol ---------------------------------------------------------------------------------------------

    def _handle(self, method, path, body, headers, query):
        user = self._user(headers)
        routes = [
            ("POST /_test/faults", lambda: self._set_faults(body)),
            ("GET /api/whoami-v2", lambda: self._whoami(user)),
            ("POST /api/repos/create", lambda: self._create(user, json.loads(body))),
            ("POST /api/validate-yaml", lambda: self._validate_yaml(json.loads(body))),
        ]
        for route, handler in routes:
            if route == f"{method} {path}":
                return handler()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path):
            return self._api(method, self._repo(match[1], user), match[2] or "", body, user, query)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch(self._repo(match[1], user), user, json.loads(body))
        if match := re.fullmatch(r"/_lfs/([0-9a-f]{64})", path):
            return self._lfs_put(match[1], body)
        if path == "/_lfs_verify":
            wanted = json.loads(body)
            return Answer(200 if len(self.objects.get(wanted["oid"], b"")) == wanted["size"] else 404)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(self._repo(match[1], user), unquote(match[2]), unquote(match[3]), user)
        return Answer(404, {"error": f"no route {method} {path}"})

    def _set_faults(self, body):
        self.faults = [Fault(**fault) for fault in json.loads(body)]
        return Answer(200)

    def _user(self, headers):
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in USERS:
            raise Answer(
                401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials in Authorization header"
            )
        return USERS.get(token)

    def _whoami(self, user):
        if user is None:
            return Answer(401, {"error": "log in"})
        orgs = [{"name": name} for name, members in ORGANISATIONS.items() if user in members]
        return Answer(200, {"type": "user", "name": user, "fullname": user, "orgs": orgs, "auth": {}})

    def _may_write(self, repo_name, user):
        owner = repo_name.split("/")[0]
        return user is not None and (owner == user or user in ORGANISATIONS.get(owner, ()))

    def _repo(self, name, user):
        repo = self.repos.get(unquote(name))
        if repo is None or (repo.is_private and not self._may_write(repo.name, user)):
            raise Answer(401 if user is None else 404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return repo

    def _must_write(self, repo, user):
        if not self._may_write(repo.name, user):
            raise Answer(401 if user is None else 403, {"error": "no write access"}, X_Error_Message="no write access")

    def _create(self, user, asked):
        name = f"{asked.get('organization') or user}/{asked['name']}"
        if not self._may_write(name, user):
            return Answer(401 if user is None else 403, {"error": "no write access"}, X_Error_Message="no write access")
        if name in self.repos:
            return Answer(409, {"url": f"{self.url}/{name}", "error": "You already created this model repo"})
        self.make(
            name, {".gitattributes": b"*.safetensors filter=lfs\n"}, is_private=asked.get("visibility") == "private"
        )
        return Answer(200, {"url": f"{self.url}/{name}"})

    def _validate_yaml(self, asked):
        is_valid = asked["content"].startswith("---\n")
        errors = [] if is_valid else [{"message": "no metadata"}]
        return Answer(200 if is_valid else 400, {"errors": errors, "warnings": []})

    def _api(self, method, repo, rest, body, user, query):
        if rest == "" or rest.startswith("revision/"):
            commit = self._commit_of(repo, unquote(rest.removeprefix("revision/")) or MAIN)
            siblings = [{"rfilename": path} for path in commit.files]
            info = {"_id": "0", "id": repo.name, "sha": commit.oid, "private": repo.is_private, "siblings": siblings}
            return Answer(200, info | {"tags": [], "lastModified": "2026-01-01T00:00:00.000Z"})
        verb, _, argument = rest.partition("/")
        argument = unquote(argument)
        if verb == "tree":
            return Answer(200, [_tree_entry(*item) for item in self._commit_of(repo, argument).files.items()])
        if verb == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in repo.refs.items()]
            return Answer(200, {"branches": branches, "tags": [], "converts": []})
        self._must_see(repo, user)
        if method == "POST" and verb == "preupload":
            return self._preupload(repo, argument, json.loads(body))
        if method == "POST" and verb == "branch":
            self._must_write(repo, user)
            if argument in repo.refs:
                return Answer(409, {"error": "Reference already exists"})
            start = json.loads(body or b"{}").get("startingPoint") or MAIN
            repo.refs[argument] = self._commit_of(repo, start).oid
            return Answer(200)
        if method == "POST" and verb == "commit":
            return self._commit(repo, argument, body, user, is_pr="create_pr" in query)
        return Answer(404, {"error": rest})

    def _must_see(self, repo, user):
        if repo.is_gated and not self._may_write(repo.name, user):
            raise Answer(401 if user is None else 403, {"error": "gated"}, X_Error_Code="GatedRepo")

    def _commit_of(self, repo, revision):
        commit = repo.find(revision)
        if commit is None:
            raise Answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return commit

    def _preupload(self, repo, revision, asked):
        there = self._commit_of(repo, revision).files
        files = []
        for file in asked["files"]:
            path = file["path"]
            oid = None
            if path in there:
                oid = hashlib.sha256(there[path]).hexdigest() if is_lfs(path) else git_hash(there[path])
            mode = "lfs" if is_lfs(path) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Answer(200, {"files": files})

    def _lfs_batch(self, repo, user, asked):
        self._must_write(repo, user)
        objects = []
        for wanted in asked["objects"]:
            actions = {
                "upload": {"href": f"{self.url}/_lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.url}/_lfs_verify"},
            }
            known = wanted["oid"] in self.objects
            objects.append(wanted if known else wanted | {"actions": actions})
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid, body):
        if hashlib.sha256(body).hexdigest() != oid:
            return Answer(400, {"error": "content is not what its name says"})
        self.objects[oid] = body
        return Answer(200)

    def _commit(self, repo, revision, body, user, is_pr):
        if not is_pr:
            self._must_write(repo, user)
        head = self._commit_of(repo, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if not is_pr and header.get("parentCommit") not in (None, head.oid):
            return Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(head.files)
        for line in lines[1:]:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.objects:
                    return Answer(400, {"error": f"LFS object {value['oid']} is missing"})
                files[value["path"]] = self.objects[value["oid"]]
            elif files.pop(value["path"], None) is None:
                return Answer(404, {"error": "A file with this name doesn't exist"}, X_Error_Code="EntryNotFound")
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        oid = repo.commit(files, header["summary"], head.oid, f"refs/pr/{number}" if is_pr else revision)
        pr = {"pullRequestUrl": f"{self.url}/{repo.name}/discussions/{number}"} if is_pr else {}
        return Answer(200, {"commitOid": oid, "commitUrl": f"{self.url}/{repo.name}/commit/{oid}"} | pr)

    def _resolve(self, repo, revision, path, user):
        self._must_see(repo, user)
        commit = self._commit_of(repo, revision)
        if path not in commit.files:
            raise Answer(404, b"Entry not found", X_Error_Code="EntryNotFound", X_Repo_Commit=commit.oid)
        content = commit.files[path]
        headers = {"X_Repo_Commit": commit.oid, "ETag": f'"{git_hash(content)}"'}
        if is_lfs(path):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(content))}
        return Answer(200, content, **headers)


def _tree_entry(path, content):
    entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    if is_lfs(path):
        oid = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return entry


class RunningHub:
    """A server on a free port of this machine, in a thread."""

    def __init__(self) -> None:
        self.hub = HubServer()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.hub, http="h11", lifespan="off", log_level="critical", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._server.started
        return self.hub

    def __exit__(self, *_) -> None:
        self._server.should_exit = True
        self._thread.join(20)
