"""Downloading, from a hub that runs in this test."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import checkpoints
import edited
import pytest
from needed import need

from gptoss_jax.checkpoint import CheckpointError, download

NAME = "somebody/tiny-gpt-oss"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(tmp_path):
    """A published folder: the checkpoint, and two more copies of it below."""
    root = tmp_path / "repository"
    checkpoints.make(root, edited.SMALL, "mxfp4-sharded", tokenizer=True)
    checkpoints.make(root / "original", edited.SMALL, "original")
    (root / "metal").mkdir()
    (root / "metal" / "model.bin").write_bytes(b"other")
    (root / "README.md").write_text("a model card")
    return root


@pytest.fixture
def hub(repository):
    """The three kinds of request that huggingface_hub makes; .asked lists the files asked for."""
    files = {str(p.relative_to(repository)): p for p in repository.rglob("*") if p.is_file()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.split("?")[0]
            if path.startswith(f"/api/models/{NAME}/revision/"):
                siblings = [{"rfilename": name} for name in files]
                found = {"id": NAME, "sha": COMMIT, "siblings": siblings}
                return self.answer(200, json.dumps(found).encode())
            if path.startswith(f"/api/models/{NAME}/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": p.stat().st_size, "oid": n}
                    for n, p in files.items()
                ]
                return self.answer(200, json.dumps(tree).encode())
            name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            if name not in files:
                return self.answer(404, X_Error_Code="RepoNotFound")
            server.asked.add(name)
            body = files[name].read_bytes()
            tag = hashlib.sha256(body).hexdigest()
            self.answer(200, body, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def fetch(tmp_path, endpoint, *names, **environment):
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    need("huggingface_hub")
    program = (
        "import sys\n"
        "from gptoss_jax.checkpoint import CheckpointError, download, inspect\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        print(download(name))\n"
        "        print(inspect(name).ok)\n"
        "    except CheckpointError as error:\n"
        "        sys.exit(str(error))\n"
    )
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "JAX_PLATFORMS": "cpu",
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    return subprocess.run(
        [sys.executable, "-c", program, *names],
        env=kept | settings | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_only_the_top_folder_is_fetched_and_an_unknown_name_is_named(tmp_path, hub, repository):
    done = fetch(tmp_path, f"http://127.0.0.1:{hub.server_port}", NAME, "somebody/else")
    assert done.returncode == 1
    assert "somebody/else: no such repository on the hub" in done.stderr.strip().splitlines()[-1]
    folder, ok = done.stdout.split()
    assert ok == "True"  # and `load(NAME)` finds it
    top = {p.name for p in repository.iterdir() if p.is_file()}
    assert hub.asked == top - {"README.md"}
    assert {p.name for p in os.scandir(folder)} == hub.asked


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["dead", "offline"])
def test_without_a_network_there_is_one_clear_line(tmp_path, environment):
    done = fetch(tmp_path, "http://127.0.0.1:9", NAME, **environment)
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if x.strip() and "Warning" not in x]
    assert line.startswith(f"{NAME}: cannot be downloaded") and "is there a network?" in line


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "", "../x", "https://huggingface.co/a/b"])
def test_names_that_are_none(name):
    with pytest.raises(CheckpointError, match="not a repository's name"):
        download(name)


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'gptoss_jax\[hub\]'"):
        download(NAME)
