"""Rollouts by a running vLLM server over HTTP: token ids in and out, weights sent after each update and checked."""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.checks import check_int, check_number, require
from grpo_moe.types import Completion, Prompt, SamplingParams

from .base import (
    as_prompts,
    check_causal_lm,
    check_sampling,
    context_length,
    sequence_keys,
    stop_token_ids,
    with_text,
)
from .probe import MAX_TOLERANCE, Probe, model_logps
from .routes import routing_hooks
from .vllm_client import Client, is_address
from .vllm_transfer import FolderTransfer, NCCLTransfer, Server
from .weights import is_sharded, published_weights

__all__ = ["FolderTransfer", "NCCLTransfer", "VLLMEngine"]

POLL_SECONDS = 0.2


class Transfer(Protocol):
    """Brings all weights of a model into the server; see :mod:`grpo_moe.rollout.vllm_transfer`."""

    def send(self, server: Server, model: torch.nn.Module) -> None:
        """Sends every weight, under the names of the published checkpoint, and returns when the server has them."""


class VLLMEngine:
    """Generates with ``vllm serve`` and keeps its weights those of the model that is trained.

    The first ``generate`` sends the weights, so the server may start from any of the same shape. After every transfer
    the server's log-probabilities of fixed random tokens must be the model's on average, so stale, missing and wrongly
    mapped weights end the run. On a tiny Qwen3-MoE of 8 experts a right server of vLLM 0.32 differs by 2e-7 nats in
    float32 and 1e-3 in float16, the model itself in bfloat16 by 5e-3, and one stale or swapped expert moves the mean by
    3e-2 or more. A single expert of a large model moves it less, so without a tolerance of yours it is twice the
    difference before the first transfer, from a server started from the same weights; ``--dtype float32`` is sharpest.

    Each sequence is a request with its own seed: completions do not depend on what else is in the batch, up to the
    rounding of the server's kernels, which may. ``sampling_logps`` are those of the sampled distribution.

    The server must run with ``VLLM_SERVER_DEV_MODE=1`` and, for a temperature other than 1, top_k or top_p, with
    ``--logprobs-mode processed_logprobs``. vLLM's API key does not guard its weight endpoints: keep the server on
    loopback or in a private network.

    Args:
        model: a transformers causal LM.
        tokenizer: for the text of completions and its EOS id; optional.
        transfer: how weights reach the server. None: another process sends to it, and this one waits for them.
        url: of the server.
        api_key: of the server, by default that in VLLM_API_KEY.
        served_model: name of the model at the server, by default the only one there.
        tolerance: mean difference of the probe's log-probabilities in nats; None: measured at the start, 0.05 at most.
        max_requests: sent at once; the server makes batches of them.
        timeout: seconds that one request, or a transfer's step, may take.

    Raises:
        ConnectionError: no server at the address.
        PermissionError: the server wants another API key.
        ValueError: it serves another model, a smaller vocabulary, or without VLLM_SERVER_DEV_MODE.
    """

    in_process = False

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        transfer: Transfer | None,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        served_model: str | None = None,
        tolerance: float | None = None,
        max_requests: int = 256,
        timeout: float = 600.0,
    ):
        check_causal_lm(model)
        api_key = api_key or os.environ.get("VLLM_API_KEY")
        _check_options(transfer, url, api_key, served_model, tolerance, max_requests, timeout)
        self.model, self.tokenizer, self.transfer = add_token_logps(model), tokenizer, transfer
        self.max_requests = max_requests
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.server = Client(url.rstrip("/"), timeout, api_key)
        self.served_model, self.server_context = self._served(served_model)
        self.vocab_size = model.config.get_text_config().vocab_size
        self.layers = model.config.get_text_config().num_hidden_layers
        self.probe = Probe(model, self.server_context, MAX_TOLERANCE if tolerance is None else tolerance)
        self._transfers, self._reports_sampled = 0, False
        self._router: RoutingRecord | None = None
        if transfer is not None:
            self.server.post("/resume")  # a run that was killed may have left it paused
            self.server.post("/update_weight_version", {"new_version": self._version})
        self._complete([self.vocab_size - 1], max_tokens=1)
        if tolerance is None:
            self.probe.calibrate(model, self._score)

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G].

        Raises:
            ValueError: an empty prompt, one that fills the context, a server whose context is too short, that reports
                log-probabilities of another distribution, or that returns no routes when asked.
            RuntimeError: the server does not hold the weights that were sent last.
        """
        check_sampling(sampling)
        prompts = as_prompts(prompts, context_length(self.model), self.model.config.get_text_config().vocab_size)
        self._check_context(prompts, sampling)
        if not self._transfers:
            self.sync_weights(self.model)
        self._check_version()
        self._check_logprobs(sampling)
        if sampling.return_routes and self._router is None:
            self._router = _router_of(self.model, sampling, self.probe.ids[:1])
        group = sampling.num_generations
        rows = [prompt for prompt in prompts for _ in range(group)]
        keys = sequence_keys(prompts, sampling).tolist()
        with ThreadPoolExecutor(min(self.max_requests, len(rows) or 1)) as pool:
            made = list(pool.map(lambda prompt, key: self._sequence(prompt, key, sampling), rows, keys))
        return [with_text(made[i : i + group], self.tokenizer) for i in range(0, len(made), group)]

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Gives the server the model's weights, empties its caches and probes it.

        Every process that uses the server calls it; the one with a transfer sends.

        Raises:
            RuntimeError: the server did not take them, or its log-probabilities are not the model's afterwards.
        """
        self._transfers += 1
        if self.transfer is not None:
            self._send(model)
        else:
            if is_sharded(model):  # the sender cannot gather alone
                for _ in published_weights(model):
                    pass
            self._await_version()
        self.probe.check(model, self._score, self.server.url)

    @property
    def _version(self) -> str:
        return f"grpo_moe {self._transfers}"

    def _served(self, name: str | None) -> tuple[str, int]:
        models = {entry["id"]: entry for entry in self.server.get("/v1/models")["data"]}
        if name is None and len(models) == 1:
            (name,) = models
        if name not in models:
            raise ValueError(f"served_model must be one of {sorted(models)} at {self.server.url}, got {name}; name it")
        return name, models[name]["max_model_len"] or 2**31

    def _send(self, model: torch.nn.Module) -> None:
        self.server.post("/pause?mode=wait")  # after a failure it stays paused: its weights may be half loaded
        self.transfer.send(self.server, model)
        if not self.server.post("/reset_prefix_cache")["success"]:
            raise RuntimeError("the server must empty its prefix cache after a transfer, got no success; see its log")
        self.server.post("/update_weight_version", {"new_version": self._version})
        self.server.post("/resume")

    def _await_version(self) -> None:
        end = time.monotonic() + self.server.timeout
        while self.server.get("/weight_info")["weight_version"] != self._version:
            if time.monotonic() > end:
                self._check_version()
            time.sleep(POLL_SECONDS)

    def _check_version(self) -> None:
        version = self.server.get("/weight_info")["weight_version"]
        if version != self._version:
            raise RuntimeError(
                f"the server at {self.server.url} must hold the weights {self._version!r}, got {version!r}; it was "
                "restarted, another run uses it, or no process has a transfer to it"
            )

    def _check_context(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        longest = max((len(p.input_ids) for p in prompts), default=0) + sampling.max_new_tokens
        needed = min(longest, context_length(self.model))
        if needed > self.server_context:
            raise ValueError(
                f"max_model_len of the server must be at least {needed} for the longest prompt and max_new_tokens, got "
                f"{self.server_context}; start it with --max-model-len {needed}"
            )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        """Twice the temperature flattens what a server reports, unless it reports the distribution before it."""
        if self._reports_sampled or (sampling.temperature in (0, 1) and not sampling.is_truncated):
            return
        ids = self.probe.ids[0, :-1].tolist()
        tops = []
        for temperature in (1.0, 2.0):
            choice = self._complete(ids, max_tokens=1, temperature=temperature, top_k=0, top_p=1.0, logprobs=1)
            tops.append(max(choice["logprobs"]["top_logprobs"][0].values()))
        if abs(tops[0] - tops[1]) < 1e-6:
            raise ValueError(
                f"logprobs_mode of the server must be processed_logprobs at temperature {sampling.temperature}, top_k "
                f"{sampling.top_k}, top_p {sampling.top_p} and min_p {sampling.min_p}, got raw ones; start it with "
                "--logprobs-mode processed_logprobs"
            )
        self._reports_sampled = True

    def _sequence(self, prompt: Prompt, key: int, sampling: SamplingParams) -> Completion:
        room = context_length(self.model) - len(prompt.input_ids)
        choice = self._complete(
            prompt.input_ids,
            max_tokens=min(sampling.max_new_tokens, room),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=key % 2**63,  # vLLM takes -1 for no seed
            logprobs=0,  # that of the sampled token alone
            stop_token_ids=list(self.stop_ids),
            ignore_eos=True,  # of the server's configuration: ours are in stop_token_ids
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        )
        ids, logps = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        if not ids or len(ids) != len(logps) or max(ids) >= self.vocab_size:
            raise RuntimeError(
                f"the server must return at least one id below {self.vocab_size} and a log-probability for each, got "
                f"{len(ids)} ids up to {max(ids, default=None)} and {len(logps)} log-probabilities; serve this model"
            )
        reason = "stop" if ids[-1] in self.stop_ids else "length"
        if reason != choice["finish_reason"]:
            raise RuntimeError(
                f"finish_reason of a completion that ends with {ids[-1]} must be {reason!r}, got "
                f"{choice['finish_reason']!r}; nobody may pause or abort the server during a rollout"
            )
        routes = None
        if sampling.return_routes:
            routes = _routes(choice.get("routed_experts"), len(prompt.input_ids) + len(ids), self.layers, self._router)
        return Completion(ids, logps, reason, routes=routes)

    def _complete(self, prompt_ids: Sequence[int], **options: Any) -> dict[str, Any]:
        # the server would fill what is left out from the model's generation_config.json
        plain = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body = {"model": self.served_model, "prompt": list(prompt_ids), **plain, **options}
        return self.server.post("/v1/completions", body)["choices"][0]

    def _score(self, ids: list[int]) -> list[float]:
        scored = self._complete(ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], scored[1:], strict=True)]


def _check_options(transfer, url, api_key, served_model, tolerance, max_requests, timeout) -> None:
    if not is_address(url):
        raise ValueError(
            f"url must start with http:// or https:// and name a host, got {url!r}; as http://127.0.0.1:8000"
        )
    sends = transfer is None or (callable(getattr(transfer, "send", None)) and not isinstance(transfer, type))
    rule = "a FolderTransfer, an NCCLTransfer or None"
    require(sends, "transfer", rule, transfer, "make one, as FolderTransfer(folder)")
    if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise ValueError(  # without the key itself: messages end up in logs
            f"api_key must be one line of ASCII text, got {type(api_key).__name__} of something else; check its source"
        )
    named = served_model is None or (isinstance(served_model, str) and served_model)
    require(bool(named), "served_model", "the name of a model at the server, or None", served_model, "leave it out")
    if tolerance is not None:
        check_number("tolerance", tolerance, lambda x: x > 0, "positive, in nats", fix="None measures it")
    check_int("max_requests", max_requests, least=1, fix="256 is the default")
    check_number("timeout", timeout, lambda x: x > 0, "positive, in seconds", fix="600 is the default")


def _router_of(model, sampling: SamplingParams, ids: torch.Tensor) -> RoutingRecord:
    """Any record of the model, for its layers, experts and K."""
    with routing_hooks(model, sampling) as routing, routing.record() as records:
        model_logps(model, ids)
    return records[0]


def _routes(encoded: str | None, tokens: int, layers: int, router: RoutingRecord) -> RoutingRecord:
    """The record [1, tokens, L, K] from vLLM's array [tokens - 1, decoder layers, K], dense layers left out.

    Raises:
        ValueError: no array, or one of another model.
    """
    if encoded is None:
        raise ValueError(
            "the server must return routes with return_routes, got none; start it with --enable-return-routed-experts"
        )
    array = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    expected = (tokens - 1, layers, router.indices.shape[-1])
    if array.shape != expected:
        raise ValueError(
            f"routed_experts of the server must have shape {expected}, got {array.shape}; serve this model"
        )
    indices = torch.from_numpy(array.astype(np.int32)).to(router.indices.dtype)
    record = replace(router, indices=indices[None, :, list(router.layers)].contiguous()).resize(tokens)
    record.check_entries()
    return record
