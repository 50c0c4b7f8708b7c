"""Models from the hub, against a local server that speaks as much of its API as a download takes."""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from jaxinfer.weights.fetch import resolve_model
from jaxinfer.weights.hub import FetchError

TOKEN = "hf_test"
WANTED = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"main's weights",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "README.md": b"words",
    "consolidated.safetensors": b"the same weights",
    "onnx/config.json": b"{}",
}
MAIN, OLD = "a" * 40, "b" * 40
# Repository -> commit -> files; a branch or tag names a commit.
REPOS = {
    "org/tiny": {MAIN: WANTED | UNWANTED, OLD: WANTED | {"model.safetensors": b"old weights"}},
    "org/pickled": {MAIN: {"config.json": b"{}", "pytorch_model.bin": b"pickle"}},
    "org/gated": {MAIN: WANTED},
    "org/private": {MAIN: WANTED},
}
REVISIONS = {"main": MAIN, "v1.0": OLD, "refs/pr/1": OLD}


class Hub(BaseHTTPRequestHandler):
    """The hub's answers: model information, file trees and files, with its headers and error codes."""

    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        """Answers with the headers alone."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answers one of the three kinds of request."""
        path = urlsplit(self.path).path.replace("%2F", "/")
        kinds = r"/api/models/(?P<repo>\w+/\w+)(?:/(?P<kind>revision|tree)/(?P<revision>.+))?"
        match = re.fullmatch(kinds, path)
        file = re.fullmatch(r"/(?P<repo>\w+/\w+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        request = (match or file or {"repo": ""}).__getitem__
        repo = request("repo")
        if error := self.refuse(repo):
            return self.answer(error[0], b"", {"X-Error-Code": error[1], "X-Error-Message": error[1]})
        revision = request("revision") or "main"
        commit = REVISIONS.get(revision, revision)
        if commit not in REPOS[repo]:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = REPOS[repo][commit]
        if file:
            content = files[file["file"]]
            if self.command == "GET":
                self.fetched.append(file["file"])
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            return self.answer(200, content, headers)
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()
        ]
        siblings = [{"rfilename": name} for name in files]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }
        self.answer(200, json.dumps(entries if request("kind") == "tree" else info).encode(), {})

    def refuse(self, repo: str) -> tuple[int, str] | None:
        """Returns the status and error code for a repository that this client may not see."""
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in REPOS:
            return 404 if knows else 401, "RepoNotFound"
        if repo == "org/gated" and not knows:
            return 401, "GatedRepo"
        return (401, "RepoNotFound") if repo == "org/private" and not knows else None

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Sends one answer."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps quiet."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    Hub.fetched.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "")
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("endpoint")
def test_hub_model_is_fetched_without_code_and_pickle(tmp_path: Path):
    folder = resolve_model("hf:org/tiny", cache_dir=tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED
    assert sorted(Hub.fetched) == sorted(WANTED)


@pytest.mark.usefixtures("endpoint")
def test_hub_model_is_fetched_once(tmp_path: Path):
    folder = resolve_model("hf:org/tiny", cache_dir=tmp_path)
    Hub.fetched.clear()
    assert resolve_model("hf:org/tiny", cache_dir=tmp_path) == folder
    assert Hub.fetched == []


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("revision", ["v1.0", OLD, "refs/pr/1"])
def test_hub_revision_is_the_one_asked_for(revision: str, tmp_path: Path):
    folder = resolve_model(f"hf:org/tiny@{revision}", cache_dir=tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"old weights"


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("name", ["hf:org/gated", "hf:org/private"])
def test_hub_token_opens_the_door(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (resolve_model(name, cache_dir=tmp_path) / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "hf:org/missing",
            "hf:org/missing is not at {endpoint}, or is private: check the name, or set HF_TOKEN",
        ),
        ("hf:org/private", "hf:org/private is not at {endpoint}, or is private"),
        ("hf:org/gated", "hf:org/gated is gated: accept its terms at {endpoint}/org/gated, and set HF_TOKEN"),
        ("hf:org/tiny@v9", "org/tiny has no revision 'v9': see {endpoint}/org/tiny"),
        ("hf:org/pickled", "no safetensors files at its top: pickled weights are never read"),
        ("hf:tiny", "'hf:tiny' is not of the form hf:org/name[@revision]"),
        ("hf:org/tiny@", "'hf:org/tiny@' is not of the form"),
        ("hf:../tiny", "could not be fetched"),
    ],
)
def test_hub_errors_say_what_to_do(name: str, words: str, tmp_path: Path, endpoint: str):
    with pytest.raises(FetchError, match=re.escape(words.format(endpoint=endpoint))):
        resolve_model(name, cache_dir=tmp_path)


def test_hub_that_cannot_be_reached_leaves_the_cache(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    folder = resolve_model("hf:org/tiny", cache_dir=tmp_path)
    nowhere = "http://127.0.0.1:9"  # the discard port: nothing listens
    monkeypatch.setenv("HF_ENDPOINT", nowhere)
    assert resolve_model("hf:org/tiny", cache_dir=tmp_path) == folder
    with pytest.raises(FetchError, match=f"hf:org/gated could not be fetched from {nowhere}"):
        resolve_model("hf:org/gated", cache_dir=tmp_path)


def test_hub_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=re.escape("pip install 'jaxinfer[hub]'")):
        resolve_model("hf:org/tiny")
