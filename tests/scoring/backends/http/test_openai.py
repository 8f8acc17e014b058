"""An OpenAI-compatible server as a judge: labels from its likeliest tokens, texts, and failures of single samples."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tests.scoring.backends.http.fault_server import FaultServer, http
from tests.scoring.judges import picture
from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.scoring.backends.http.client import HttpSettings
from truebatch.scoring.backends.http.openai import HttpBackend
from truebatch.scoring.readouts import Generate, Head, Labels, YesNo
from truebatch.scoring.readouts.scale import Scale
from truebatch.scoring.runner import Limits, RunConfig, run_samples
from truebatch.scoring.store.export import read_rows
from truebatch.scoring.store.input_index import list_samples

ASKING = HttpSettings(timeout=10, pause=0.01)


class Server(BaseHTTPRequestHandler):
    """Says how long the last message is; fails as the message asks."""

    seen: ClassVar[list] = []
    failures = 0

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(request)
        content = request["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        if text == "flaky" and type(self).failures < 1:
            type(self).failures += 1
            return self.give(503, {"error": "busy"})
        codes = {"too long": 400, "broken": 500, "forbidden": 404}
        if text in codes:
            return self.give(codes[text], {"error": text})
        if text == "odd":
            return self.give(200, {"nothing": "useful"})
        yes = 0.5 if text != "unsure" else 0.0
        top = [{"token": t, "logprob": math.log(p)} for t, p in (("Yes", yes), ("No", 0.25), ("Hm", 0.1)) if p]
        top = [{"token": "Hm", "logprob": -0.1}] if text == "off topic" else top
        message = {"content": f"I give it {len(text)}" if text != "wordy" else "no idea"}
        choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": [{"top_logprobs": top}]}}
        return self.give(200, {"choices": [choice], "usage": {"total_tokens": 9}})

    def give(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    Server.seen, Server.failures = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_labels_texts_and_failures_of_single_samples(address, tmp_path):
    users = ["hello", "flaky", "unsure", "off topic", "too long", "broken", "odd"]
    backend = HttpBackend(address, "m", YesNo(), ASKING)
    run_samples(list_samples(users), [backend], tmp_path, Limits(level="close"), RunConfig())
    rows = dict(zip(users, read_rows(tmp_path), strict=True))
    assert rows["hello"]["score"] == rows["flaky"]["score"] == pytest.approx(0.5 / 0.75)
    assert rows["unsure"]["score"] == 0.0
    assert rows["unsure"]["output"]["missing"] == ["Yes"]
    assert rows["unsure"]["output"]["at_most"] == pytest.approx(0.1)
    kinds = {user: rows[user]["kind"] for user in users[3:]}
    assert kinds == {"off topic": "no_mass", "too long": "http_400", "broken": "http_500", "odd": "bad_answer"}


def test_texts_are_parsed_and_settings_are_sent(address):
    settings = Generation(max_new_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=("\n",))
    backend = HttpBackend(address, "m", Generate(settings, scale=Scale()), ASKING)
    samples = [one.asked for one in list_samples(["four", "wordy"])]
    good, bad = backend.judge([backend.prepare(one) for one in samples])
    assert (good.score, good.output["text"], good.tokens) == (4.0, "I give it 4", 9)
    assert (bad.kind, bad.output["text"]) == ("no_number", "no idea")
    sent = Server.seen[0]
    assert {name: sent[name] for name in ("model", "max_tokens", "temperature", "top_p", "seed", "stop")} == {
        "model": "m", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n"],
    }  # fmt: skip


def test_images_travel_at_their_places(address):
    backend = HttpBackend(address, "m", Labels({"Yes": 1, "No": 0}), ASKING)
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": picture(0, 4, 4)}, {"type": "text", "text": "b"}]
    placed, loose = list_samples([[{"role": "user", "content": parts}], {"user": "u", "images": [picture(1, 4, 4)]}])
    kinds = [part["type"] for part in backend.prepare(placed.asked)["messages"][0]["content"]]
    assert kinds == ["text", "image_url", "text"]
    first, second = backend.prepare(loose.asked)["messages"][0]["content"]
    assert first["image_url"]["url"].startswith("data:image/png;base64,")
    assert second == {"type": "text", "text": "u"}


def test_a_server_that_is_not_there_or_refuses_all_stops_the_run(address, tmp_path):
    backend = HttpBackend(address, "m", YesNo(), ASKING)
    with pytest.raises(ConfigError, match="rejects every request"):
        run_samples(list_samples(["forbidden"]), [backend], tmp_path / "a", Limits(level="close"), RunConfig())
    gone = HttpBackend("http://127.0.0.1:9/v1", "m", YesNo(), ASKING)
    with pytest.raises(ConfigError, match="cannot be reached"):
        run_samples(list_samples(["x"]), [gone], tmp_path / "b", Limits(level="close"), RunConfig())
    with pytest.raises(ConfigError, match="head"):
        HttpBackend(address, "m", Head())


def test_the_byte_limit_of_an_answer_grows_with_what_is_asked_for(address):
    """A text of many tokens is no flood; an answer with a label is short."""
    long = {"token": "Yes", "logprob": -0.1, "bytes": [1] * 100_000}
    for readout, is_short in ((YesNo(), True), (Generate(Generation(max_new_tokens=10_000)), False)):
        choice = {
            "message": {"content": "a" * 300_000},
            "finish_reason": "length",
            "logprobs": {"content": [{"top_logprobs": [long]}]},
        }
        with FaultServer({"x": (http({"choices": [choice]}), "")}) as server:
            backend = HttpBackend(server.address, "m", readout, ASKING)
            (found,) = backend.judge([backend.prepare(one.asked) for one in list_samples(["x"])])
            backend.close()
        assert (getattr(found, "kind", "") == "too_large") == is_short


def test_a_server_is_told_the_form_of_the_answer(address):
    for way in ("json", "guided_json", "guided_choice"):
        readout = Generate(Generation(max_new_tokens=7), scale=Scale("number", 1, 3), structured=way)
        sent = HttpBackend(address, "m", readout, ASKING).prepare(next(iter(list_samples(["four"]))).asked)
        if way == "guided_choice":
            assert sent[way] == ['{"score": 1}', '{"score": 2}', '{"score": 3}']
            continue
        schema = sent["guided_json"] if way == "guided_json" else sent["response_format"]["json_schema"]["schema"]
        assert schema["properties"] == {"score": {"enum": [1, 2, 3]}}
        assert (schema["required"], schema["additionalProperties"]) == (["score"], False)
