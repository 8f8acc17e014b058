"""A server of completions on loopback that holds a model: as vLLM answers, or with the echo of OpenAI's completions."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class Completions:
    """What it answers with, and how; `change` may alter logits, and `bos` is put before every prompt."""

    def __init__(self, model, *, form="vllm", bos=None, change=None, decimals=None, tokenize=None, status=None):
        self.model, self.form, self.bos = model, form, bos
        self.change, self.decimals, self.tokenize, self.status = change, decimals, tokenize, status
        self.requests = []

    def answer(self, request):
        self.requests.append(request)
        given = request["prompt"]
        ids = list(self.tokenize(given) if isinstance(given, str) else given)
        ids = ids if self.bos is None else [self.bos, *ids]
        values = self.logprobs(ids)
        if self.form == "vllm":
            if "prompt_logprobs" not in request:
                return 400, {"error": "unknown"}
            entries = [
                {str(i): {"logprob": v, "rank": 1, "decoded_token": f"<{i}>"}}
                for i, v in zip(ids[1:], values, strict=True)
            ]
            return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *entries]}]}
        if self.form == "none":
            return 200, {"choices": [{"text": "x"}]}
        if not request.get("echo"):
            return 400, {"error": "prompt_logprobs is not known here"}
        if self.form == "echo1" and request["max_tokens"] == 0:
            return 400, {"error": "max_tokens must be at least 1"}
        new = request["max_tokens"]
        logprobs = {"tokens": [f"<{i}>" for i in [*ids, *[9] * new]], "token_logprobs": [None, *values, *[-0.5] * new]}
        return 200, {"choices": [{"text": "", "logprobs": logprobs}], "usage": {"prompt_tokens": len(ids)}}

    def logprobs(self, ids):
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0].double()
        logits = logits if self.change is None else self.change(logits)
        rows = torch.log_softmax(logits[:-1], -1)
        values = [float(row[i]) for row, i in zip(rows, ids[1:], strict=True)]
        return values if self.decimals is None else [round(v, self.decimals) for v in values]


@contextmanager
def served(completions):
    """The address of the server, while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "tiny"}]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if completions.status is not None:
                self.send_response(completions.status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                return
            self.reply(*completions.answer(request))

        def reply(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Nothing on the terminal of the tests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
