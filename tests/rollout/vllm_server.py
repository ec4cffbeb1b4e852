"""The part of vLLM's HTTP interface that VLLMEngine uses, by a transformers model in this process, with its faults."""

import base64
import copy
import io
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file

from grpo_moe.adapters.routing import RoutingReplay


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class FakeServer:
    """Serves a copy of ``model`` until the context closes. Answers have the form of vLLM 0.32's.

    Args:
        after_load: called with the served model and its weights before, once new ones are loaded: where they go wrong.
    """

    def __init__(self, model, *, api_key="sesame", raw=False, dev_mode=True, max_model_len=None, after_load=None):
        self.api_key, self.raw, self.dev_mode, self.after_load = api_key, raw, dev_mode, after_load
        self.returns_routes = False
        self.max_model_len = max_model_len or model.config.max_position_embeddings
        self.model = copy.deepcopy(model).eval()
        self.version, self.paused, self.calls, self.lock = "default", False, [], threading.Lock()
        self.received = {}

    def __enter__(self):
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, method, target, body, authorization):
        path = urlsplit(target).path
        self.calls.append(target)
        if path.startswith("/v1") and authorization != f"Bearer {self.api_key}":
            raise Refused(401, "Unauthorized")
        if (method, path) not in ROUTES or not (self.dev_mode or path.startswith("/v1")):
            raise Refused(404, "Not Found")
        with self.lock, torch.no_grad():
            return ROUTES[method, path](self, body)

    def load(self, weights):
        """New weights under the names of the checkpoint, all of them, through transformers' own loader."""
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        model, report = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=weights, output_loading_info=True
        )
        if report["missing_keys"] or report["unexpected_keys"]:
            raise Refused(500, str(report))
        self.model = model.eval()
        if self.after_load is not None:
            self.after_load(self.model, before)


ROUTES = {}


def _route(method, path):
    def add(function):
        ROUTES[method, path] = function
        return function

    return add


@_route("GET", "/v1/models")
def models(server, body):
    return {"data": [{"id": "policy", "max_model_len": server.max_model_len}]}


@_route("GET", "/weight_info")
def weight_info(server, body):
    return {"weight_version": server.version}


@_route("GET", "/get_world_size")
def get_world_size(server, body):
    return {"world_size": 1}


@_route("POST", "/update_weight_version")
def update_weight_version(server, body):
    server.version = body["new_version"]
    return {"success": True, "new_version": server.version}


@_route("POST", "/pause")
def pause(server, body):
    server.paused = True
    return {"status": "paused"}


@_route("POST", "/resume")
def resume(server, body):
    server.paused = False
    return {"status": "resumed"}


@_route("POST", "/reset_prefix_cache")
def reset_prefix_cache(server, body):
    return {"success": True}


@_route("POST", "/collective_rpc")
def collective_rpc(server, body):
    assert body["method"] == "reload_weights" and server.paused
    files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
    server.load({name: tensor for file in files for name, tensor in load_file(file).items()})
    return {"results": [None]}


@_route("POST", "/init_weight_transfer_engine")
def init_weight_transfer_engine(server, body):
    server.received = {"init": body["init_info"]}
    return {"message": "Weight transfer initialized"}


@_route("POST", "/start_weight_update")
def start_weight_update(server, body):
    assert server.paused
    return {"message": "Weight update started"}


@_route("POST", "/update_weights")
def update_weights(server, body):
    server.received["update"] = body["update_info"]
    return {"message": "Weights updated"}


@_route("POST", "/finish_weight_update")
def finish_weight_update(server, body):
    server.load(server.received["weights"])
    return {"message": "Weight update finished"}


@_route("POST", "/v1/completions")
def completions(server, body):
    assert not server.paused
    if body["model"] != "policy":
        raise Refused(404, f"The model `{body['model']}` does not exist.")
    ids = list(body["prompt"])
    if max(ids) >= server.model.config.vocab_size:
        raise Refused(400, f"Token id {max(ids)} is out of vocabulary")
    if len(ids) + body["max_tokens"] > server.max_model_len + (body.get("prompt_logprobs") is not None):
        raise Refused(400, f"This model's maximum context length is {server.max_model_len} tokens")
    choice = {"index": 0, "prompt_logprobs": None, "finish_reason": "length", "stop_reason": None}
    if body.get("prompt_logprobs") is not None:
        logps = server.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = [_with_others(logps[i], token) for i, token in enumerate(ids[1:])]
        choice["prompt_logprobs"] = [None, *scored]
    generator = torch.Generator().manual_seed(body.get("seed") or 0)
    tokens, reported, tops = [], [], []
    while len(tokens) < body["max_tokens"]:
        token, logp, top = _draw(server, ids + tokens, body, generator)
        tokens.append(token)
        reported.append(logp)
        tops.append(top)
        if token in body.get("stop_token_ids", ()):
            choice |= {"finish_reason": "stop", "stop_reason": token}
            break
    choice |= {
        "token_ids": tokens if body.get("return_token_ids") else None,
        "logprobs": None if body.get("logprobs") is None else {"token_logprobs": reported, "top_logprobs": tops},
        "routed_experts": _routed_experts(server, ids + tokens) if server.returns_routes else None,
    }
    return {"model": "policy", "choices": [choice]}


def _draw(server, ids, body, generator):
    logits = server.model(torch.tensor([ids])).logits[0, -1]
    temperature = body.get("temperature", 1.0)
    processed = logits / (temperature or 1.0)
    if body.get("top_k"):
        processed = processed.masked_fill(processed < processed.topk(body["top_k"]).values[-1], -torch.inf)
    token = processed.softmax(-1).multinomial(1, generator=generator) if temperature else processed.argmax()
    logps = (logits if server.raw else processed).log_softmax(-1)
    tops = {f"token_id:{int(x)}": float(logps[x]) for x in logps.topk(2).indices}  # the token need not be one of them
    return int(token), float(logps[token]), tops


def _with_others(logps, token):
    """The entry of a prompt token among those of likelier ones, as vLLM may give them; its place says nothing."""
    others = [int(x) for x in logps.topk(2).indices if x != token]
    return {str(x): {"logprob": float(logps[x])} for x in (*others, token)}


def _routed_experts(server, ids):
    with RoutingReplay(server.model) as routing, routing.record() as records:
        server.model(torch.tensor([ids[:-1]]), use_cache=False)
    chosen = records[0].indices[0].numpy()  # [T, L, K]
    every_layer = np.zeros((len(chosen), server.model.config.num_hidden_layers, chosen.shape[-1]), np.uint8)
    every_layer[:, list(routing.layers)] = chosen
    with io.BytesIO() as buffer:
        np.save(buffer, every_layer)
        return base64.b64encode(buffer.getvalue()).decode()


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._reply("GET")

        def do_POST(self):
            self._reply("POST")

        def _reply(self, method):
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, content = 200, server.answer(method, self.path, json.loads(sent) if sent else None, self.key)
            except Refused as error:
                status, content = error.status, {"error": {"message": str(error)}}
            try:
                data = json.dumps(content, allow_nan=False).encode()
            except ValueError:
                status, data = 400, b'{"error": {"message": "Out of range float values are not JSON compliant"}}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client gave up
                self.wfile.write(data)

        @property
        def key(self):
            return self.headers.get("Authorization")

        def log_message(self, *args):
            pass

    return Handler
