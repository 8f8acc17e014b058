"""A judge on a server: pictures in the request, a structured answer, an address that is wrong."""

from __future__ import annotations

import base64
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from PIL import Image

from truebatch.cli.app import run

SEEN: list[dict] = []


class Judge(BaseHTTPRequestHandler):
    """Gives 7, and cannot read the picture of one pair."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append(asked)
        text = '{"score": 7}' if len(SEEN) % 4 else "I cannot see a picture."
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": {"total_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    SEEN.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def settings(tmp_path, **params):
    """Made pictures edited by a script, and a judge on a server."""
    flat = [f"reward_model.params.{name}={value}" for name, value in params.items()]
    chosen = ["benchmark.samples=8", f"evaluation.output_dir={tmp_path / 'run'}", "reward_model.type=http", *flat]
    chosen.append("evaluation.max_failure_rate=0.5")
    return [part for one in chosen for part in ("--set", one)]


def test_a_server_judges_pairs_with_both_pictures(address, tmp_path, capsys):
    pytest.importorskip("httpx2")
    command = settings(tmp_path, address=address, model_name="judge", structured="json", key_env="''")
    assert run(["vl_reward", "run", *command]) == 3
    assert len(SEEN) == 8
    content = SEEN[0]["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    sizes = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size for url in urls]
    assert len(sizes) == 2
    assert SEEN[0]["response_format"]["type"] == "json_schema"
    out = capsys.readouterr().out
    assert out.count("Processed image") == 8
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["overall"]["statuses"] == {"no_number": 2, "ok": 6}
    assert report["overall"]["mean"] == 7.0
    assert report["metric"]["kind"] == "number"
    assert run(["vl_reward", "run", *command]) == 3
    assert len(SEEN) == 8  # nothing is asked twice


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model_name": "m"}, "reward_model.params.address"),
        ({"address": "http://127.0.0.1:9/v1"}, "reward_model.params.model_name"),
        ({"address": "http://127.0.0.1:9/v1", "model_name": "m", "readout": "expected"}, "readout"),
        ({"address": "http://127.0.0.1:9/v1", "model_name": "m", "dtype": "float16"}, "reward_model.params.dtype"),
        ({"address": "nowhere", "model_name": "m"}, "nowhere"),
    ],
)
def test_what_a_server_cannot_do_is_said_before_anything_is_edited(tmp_path, capsys, params, said):
    assert run(["vl_reward", "run", *settings(tmp_path, **params)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "edits").exists()
