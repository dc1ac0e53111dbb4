"""A server that speaks the protocol of the Hugging Face Hub, for the real client: `python hub_server.py FOLDER`.

    FOLDER/repos/ORG/NAME/COMMIT/...    the files of a commit
    FOLDER/repos/ORG/NAME/refs.json     branches and tags: commit
    FOLDER/repos/ORG/NAME/access        "private" or "gated": only with the token
    FOLDER/requests.jsonl               every request, appended as it arrives
    FOLDER/cut                          the next large file is cut off after this many bytes, once

It prints its port. The state is on disk, so a test process can prepare and inspect it.
"""

import base64
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_a_test"
LARGE = ".safetensors"  # stored in LFS, as the Hub does with weights


def publish(root: Path, repo: str, files: dict[str, bytes], *, branch: str = "main", access: str = "") -> str:
    """Commit files to a repository; returns the commit."""
    content = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
    commit, folder = hashlib.sha1(repr(content).encode()).hexdigest(), root / "repos" / repo
    for name, data in files.items():
        (folder / commit / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / commit / name).write_bytes(data)
    refs = json.loads((folder / "refs.json").read_text()) if (folder / "refs.json").is_file() else {}
    (folder / "refs.json").write_text(json.dumps(refs | {branch: commit}))
    if access:
        (folder / "access").write_text(access)
    return commit


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status, code, message=""):
        self.answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def dispatch(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        record = {"method": self.command, "path": path, "range": self.headers.get("Range")}
        record |= {"agent": self.headers.get("User-Agent"), "authorized": self.authorized}
        with (self.root / "requests.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            return self.send_file(self.root / "lfs" / parts[1])
        if parts[0] == "lfs":
            return self.store(parts[1], body)
        if not self.authorized and self.command in ("POST", "PUT"):
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if parts[:2] == ["api", "models"]:
            return self.api("/".join(parts[2:4]), parts[4:], body)
        if len(parts) > 1 and parts[1].endswith(".git"):
            return self.lfs_batch(json.loads(body))
        if len(parts) < 5 or parts[2] != "resolve":
            return self.answer(404)
        return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_GET = do_HEAD = do_POST = do_PUT = dispatch

    @property
    def authorized(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def find(self, repo, revision):
        """The commit of a revision; answers and returns None if there is none."""
        folder = self.root / "repos" / repo
        access = (folder / "access").read_text() if (folder / "access").is_file() else ""
        if not (folder / "refs.json").is_file() or (access == "private" and not self.authorized):
            return self.fail(401 if not self.authorized else 404, "RepoNotFound", "Repository not found")
        commit = json.loads((folder / "refs.json").read_text()).get(revision, revision)
        if not (folder / commit).is_dir():
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def api(self, repo, rest, body):
        kind, revision = (*rest, "main", "main")[:2] if rest else ("revision", "main")
        if kind == "preupload":
            large = [file["path"].endswith(LARGE) for file in json.loads(body)["files"]]
            modes = ["lfs" if is_large else "regular" for is_large in large]
            files = zip(json.loads(body)["files"], modes, strict=True)
            return self.answer(
                200, {"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in files]}
            )
        if kind == "commit":
            return self.commit(repo, revision, [json.loads(line) for line in body.splitlines()])
        commit = self.find(repo, revision)
        if commit is None:
            return None
        folder = self.root / "repos" / repo / commit
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if kind == "tree":
            return self.answer(200, [self.entry(file, folder) for file in files], Content_Type="application/json")
        siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
        return self.answer(200, {"id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings})

    def entry(self, file, folder):
        size, oid = file.stat().st_size, git_hash(file)
        entry = {"type": "file", "path": file.relative_to(folder).as_posix(), "size": size, "oid": oid}
        if file.name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(file.read_bytes()).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def resolve(self, repo, revision, name):
        commit = self.find(repo, revision)
        if commit is None:
            return None
        access = self.root / "repos" / repo / "access"
        if access.is_file() and access.read_text() == "gated" and not self.authorized:
            return self.fail(403, "GatedRepo", "Access to this model is restricted")
        file = self.root / "repos" / repo / commit / name
        if not file.is_file():
            return self.fail(404, "EntryNotFound", "Entry not found")
        if not name.endswith(LARGE):
            return self.send_file(file, ETag=f'"{git_hash(file)}"', X_Repo_Commit=commit)
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "lfs").mkdir(exist_ok=True)
        (self.root / "lfs" / digest).write_bytes(data)
        headers = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": commit}
        cdn = f"http://localhost:{self.server.server_port}"  # another host than the Hub's, as in reality
        return self.answer(302, Location=f"{cdn}/cdn/{digest}", **headers)

    def send_file(self, file, **headers):
        data = file.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest, cut = data[start:], self.root / "cut"
        if self.command == "GET" and file.parent.name == "lfs" and cut.is_file():
            rest, length = rest[: int(cut.read_text())], len(rest)
            cut.unlink()
            headers["Content_Length"] = str(length)
            self.close_connection = True  # before the promised end
        self.answer(206 if start else 200, rest, **headers)

    def create(self, request):
        repo = f"{request['organization'] or 'me'}/{request['name']}"
        folder = self.root / "repos" / repo
        status = 409 if folder.is_dir() else 200
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "created.json").write_text(json.dumps(request))
        self.answer(status, {"url": f"http://{self.headers['Host']}/{repo}", "name": repo})

    def validate(self, content):
        import yaml

        try:
            metadata = yaml.safe_load(content.split("---\n")[1])
            assert isinstance(metadata["tags"], list)
        except Exception as error:
            return self.answer(400, {"errors": [{"message": repr(error)}], "warnings": []})
        return self.answer(200, {"errors": [], "warnings": []})

    def lfs_batch(self, request):
        def actions(entry):
            href = f"http://{self.headers['Host']}/lfs/{entry['oid']}"
            return {"oid": entry["oid"], "size": entry["size"], "actions": {"upload": {"href": href}}}

        self.answer(200, {"transfer": "basic", "objects": [actions(entry) for entry in request["objects"]]})

    def store(self, digest, data):
        if hashlib.sha256(data).hexdigest() != digest:
            return self.answer(400)
        (self.root / "lfs").mkdir(exist_ok=True)
        (self.root / "lfs" / digest).write_bytes(data)
        return self.answer(200)

    def commit(self, repo, branch, lines):
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = (self.root / "lfs" / value["oid"]).read_bytes()
        oid = publish(self.root, repo, files, branch=branch)
        url = f"http://{self.headers['Host']}/{repo}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url})


def git_hash(file: Path) -> str:
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


if __name__ == "__main__":
    HubHandler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    print(server.server_port, flush=True)
    server.serve_forever()
