"""Records which experts a model chose, and makes a later forward, or the recompute of a checkpoint, choose the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from .routing_record import RoutingRecord, dead_experts, max_violation, scatter_tokens
from .routing_rules import RouterRule, match_rule

__all__ = ["RoutingRecord", "RoutingReplay", "dead_experts", "freeze_routers", "has_experts", "max_violation"]


class RoutingReplay:
    """Hooks on the routers of a transformers MoE model, to record and to replay what they choose.

    A router is the child ``gate`` or ``router`` beside a child ``experts``. Only the discrete choice is replayed:
    weights come from the live logits by the router's own rule, so the gradient reaches the router. The model may be
    wrapped (DDP, FSDP2, PEFT). Hooks go with :meth:`close` or at the end of a ``with`` block.

    Checkpointed layers recompute with the experts of their own forward, also when nothing is replayed, once enabled by
    ``model.gradient_checkpointing_enable(replay.checkpointing_kwargs)``; :meth:`replay` may then end before backward,
    and several forwards may precede it. Other checkpointing (reentrant, accelerate's wrapper) raises in backward.

    Not recorded: the last sampled token of a generation, and forwards that run no Python, as replays of CUDA graphs.

    Raises:
        ValueError: no router is found, two share a layer number, or experts stand without a router.

    Source: R3, arXiv 2510.11370; GSPO, arXiv 2507.18071 (routing replay).
    """

    def __init__(self, model: nn.Module):
        base = next((m.base_model for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if base is None:
            raise ValueError(f"model must be or wrap a transformers model, got {type(model).__name__}; pass one")
        routers = _find_routers(base)
        self.layers = tuple(sorted(routers))
        # Plain attributes, not thread-locals: on a GPU the recompute runs in a thread of autograd.
        self._forward: _Forward | None = None
        self._region: _Region | None = None
        self._record: RoutingRecord | None = None
        self._unused = False
        self._replayed = False  # whether any forward has taken a record
        self._sinks: list[tuple[list[RoutingRecord], bool]] = []
        self._sums: list[torch.Tensor] | None = None
        self._sum_mask: torch.Tensor | None = None
        self._rules: dict[int, RouterRule] = {}
        self._handles = [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            base.register_forward_hook(self._end, always_call=True),
        ]
        for layer, (name, router) in routers.items():
            self._handles.append(router.register_forward_hook(functools.partial(self._route, layer, name)))

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> RoutingReplay:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def checkpointing_kwargs(self) -> dict:
        """For ``gradient_checkpointing_enable``: non-reentrant, with recomputes bound to their forwards."""
        return {"use_reentrant": False, "context_fn": self._checkpoint_contexts}

    @contextmanager
    def record(self, *, natural: bool = False) -> Iterator[list[RoutingRecord]]:
        """Yields a list that gets a record [B, T, L, K] of each forward inside.

        Join them with :meth:`RoutingRecord.concat_rows` (micro-batches) or ``concat_steps`` (a generation).

        Args:
            natural: what each router chose itself, instead of what is used, under a replay.

        Raises:
            ValueError: at the end, when no forward of the model ran.
        """
        records: list[RoutingRecord] = []
        self._sinks.append((records, natural))
        try:
            yield records
        finally:
            self._sinks.pop()
        if not records:
            raise ValueError(
                "a forward of the model must run inside record(), got none; call the model, after a change of its "
                "modules with a new RoutingReplay (replays of CUDA graphs run no hooks)"
            )

    @contextmanager
    def sum_probabilities(self, token_mask: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yields a list that gets of each forward inside the routers' probabilities [L, E] fp32, with gradient.

        They are summed over the tokens under ``token_mask`` [B, T]: softmax of the live logits, or normalised sigmoids
        where the router scores with sigmoids.
        """
        outer = self._sums, self._sum_mask
        self._sums, self._sum_mask = [], token_mask.bool()
        try:
            yield self._sums
        finally:
            self._sums, self._sum_mask = outer

    @contextmanager
    def replay(self, record: RoutingRecord) -> Iterator[None]:
        """Every forward inside, of [B, T] tokens, takes the experts of ``record`` [B, T, L, K]; -1 routes naturally.

        Raises:
            ValueError: a router without a record, a layer of the record without a router, an entry that is no set of
                experts, another shape, K or E than the forward's; at the end, when no forward consumed the record.
        """
        if record.layers != self.layers:
            missing, left = sorted({*self.layers} - {*record.layers}), sorted({*record.layers} - {*self.layers})
            raise ValueError(
                f"record must have the layers of the model's routers, {list(self.layers)}, got none for layers "
                f"{missing} and left-over layers {left}; record with this model"
            )
        record.check_entries()
        outer = self._record, self._unused
        self._record, self._unused, self._replayed = record, True, True
        try:
            yield
            if self._unused:
                raise ValueError(
                    f"record must be consumed, got no forward for layers {list(self.layers)}; call the model, after a "
                    "change of its modules with a new RoutingReplay"
                )
        finally:
            self._record, self._unused = outer

    def _begin(self, base, args, kwargs) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return  # the model says what it misses
        shape, mask = tuple(tokens.shape[:2]), kwargs.get("attention_mask")
        if self._record is not None and self._record.indices.shape[:2] != shape:
            raise ValueError(
                f"record must be [B, T] = {list(shape)} as the forward, got {list(self._record.indices.shape[:2])} for "
                f"layers {list(self.layers)}; cut it like the tokens, with rows(), resize() or pack()"
            )
        plain = isinstance(mask, torch.Tensor) and mask.dim() == 2
        self._forward = _Forward(shape, mask[:, -shape[1] :].bool() if plain else None)

    def _end(self, base, args, output) -> None:
        forward, self._forward = self._forward, None
        if output is None or self._idle:
            return  # no output: the forward raised
        if missing := [layer for layer in self.layers if layer not in forward.chosen]:
            raise ValueError(
                f"the routers of layers {missing} must run once in a forward, got no call: their layer was skipped, or "
                "a kernel routes in their place; turn that off"
            )
        self._unused = False
        for records, natural in self._sinks:
            kept = forward.natural if natural else forward.chosen
            indices = torch.stack([kept[layer] for layer in self.layers], 2)
            records.append(RoutingRecord(indices, self.layers, forward.num_experts))
        if self._sums is not None:
            self._sums.append(torch.stack([self._sum_of(layer, forward) for layer in self.layers]))

    @property
    def _idle(self) -> bool:
        return self._record is None and not self._sinks and self._sums is None

    def _sum_of(self, layer: int, forward: _Forward) -> torch.Tensor:
        probabilities = self._rules[layer].probabilities(forward.logits[layer])  # [N, E]
        mask = self._sum_mask
        mask = mask.flatten() if len(probabilities) == mask.numel() else mask[forward.attention_mask]
        return torch.where(mask[:, None], probabilities, 0).sum(0)

    def _route(self, layer, name, router, args, out):
        """Forward hook of a router: puts the experts to use and their live weights into its output."""
        region, forward = self._region, self._forward
        recompute = region is not None and region.recompute
        if forward is None and not recompute:
            if self._idle and not self._replayed:
                return out  # of a recompute by a checkpointing of someone else, whose forward chose as this will
            raise ValueError(
                f"the router {name} must run in a forward of the model or a recompute that knows its forward, got a "
                "call outside of both; use gradient_checkpointing_enable(replay.checkpointing_kwargs)"
            )
        if region is None and self._idle:
            return out
        rule = self._rules.get(layer) or match_rule(name, router, out)
        logits, weights, natural = (out[position] for position in rule.positions)
        if len(natural):  # without a token every rule matches
            self._rules[layer] = rule
        if recompute:
            chosen = region.chosen[layer]
        else:
            chosen = forward.choose(layer, natural, logits.shape[1], self._record)
            forward.logits[layer] = logits
        if region is not None:
            region.chosen[layer] = chosen
        elif self._record is None:
            return out
        live = rule.weights(logits, chosen).to(weights.dtype)  # in the forward too: it must save what a recompute does
        if weights.requires_grad and not live.requires_grad:
            raise ValueError(f"logits of router {name} must carry gradient, got detached ones; replay cannot train it")
        new = list(out)
        new[rule.positions[1]], new[rule.positions[2]] = live, chosen
        return tuple(new)

    def _checkpoint_contexts(self) -> tuple[_Region, _Region]:
        chosen: dict[int, torch.Tensor] = {}
        return _Region(self, chosen, recompute=False), _Region(self, chosen, recompute=True)


def freeze_routers(model: nn.Module) -> None:
    """Takes the parameters of every router out of training.

    Raises:
        ValueError: as :class:`RoutingReplay`.
    """
    base = next((m.base_model for m in model.modules() if isinstance(m, PreTrainedModel)), model)
    for _, router in _find_routers(base).values():
        router.requires_grad_(False)


def has_experts(model: nn.Module) -> bool:
    """Whether any module of the model has a child ``experts``."""
    return any("experts" in dict(module.named_children()) for module in model.modules())


@dataclass
class _Forward:
    """One forward of the base model."""

    shape: tuple[int, int]
    """B, T."""
    attention_mask: torch.Tensor | None
    """[B, T] bool, True for real tokens; None without a plain mask."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Experts used, by layer: [B, T, K] int16 or int32, -1 for tokens that the router did not see."""
    natural: dict[int, torch.Tensor] = field(default_factory=dict)
    """The same of the experts that the routers chose themselves."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of the routers, by layer: [N, E]."""
    num_experts: int = 0

    def choose(self, layer: int, natural: torch.Tensor, num_experts: int, record: RoutingRecord | None) -> torch.Tensor:
        """Experts [N, K] for a router to use: those of the record, and its natural choice where there are none."""
        if layer in self.chosen:
            raise ValueError(f"the router of layer {layer} must run once in a forward, got two calls; not supported")
        chosen, mask = natural, self.attention_mask
        if len(natural) == self.shape[0] * self.shape[1]:
            mask = None
        elif mask is None or len(natural) != int(mask.sum()):  # GPT-OSS-Lite routes the tokens under the mask
            raise ValueError(
                f"the router of layer {layer} must see all tokens {list(self.shape)}, or those under the attention "
                f"mask, got {len(natural)}; not supported"
            )
        if record is not None:
            if (record.indices.shape[-1], record.num_experts) != (natural.shape[1], num_experts):
                raise ValueError(
                    f"record must have K = {natural.shape[1]} of E = {num_experts} experts in layer {layer}, got K = "
                    f"{record.indices.shape[-1]} of E = {record.num_experts}; record with this model"
                )
            forced = record.indices[:, :, record.layers.index(layer)].to(natural)  # [B, T, K]
            forced = forced.flatten(0, 1) if mask is None else forced[mask]
            chosen = torch.where(forced >= 0, forced, natural)
        dtype = torch.int16 if num_experts <= 2**15 else torch.int32
        for kept, experts in ((self.chosen, chosen), (self.natural, natural)):
            stored = experts.to(dtype)
            kept[layer] = stored.view(*self.shape, -1) if mask is None else scatter_tokens(stored, mask)
        self.num_experts = num_experts
        return chosen


class _Region:
    """Context of a checkpointed layer. Its recompute takes what its forward chose; it may be entered many times."""

    def __init__(self, owner: RoutingReplay, chosen: dict[int, torch.Tensor], *, recompute: bool):
        self.owner, self.chosen, self.recompute, self.outer = owner, chosen, recompute, []

    def __enter__(self):
        self.outer.append(self.owner._region)
        self.owner._region = self

    def __exit__(self, *error):
        self.owner._region = self.outer.pop()


def _find_routers(base: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Name and module of each router by layer number: the first number in its name."""
    routers: dict[int, tuple[str, nn.Module]] = {}
    for parent, module in base.named_modules():
        children = dict(module.named_children())
        if "experts" not in children:
            continue
        child = next((child for child in ("gate", "router") if child in children), None)
        layer = next((int(part) for part in parent.split(".") if part.isdigit()), None)
        if child is None or layer is None or layer in routers:
            raise ValueError(
                f"{parent} ({type(module).__name__}) must have a child gate or router beside its experts, and a layer "
                f"number of its own, got children {list(children)} and layer {layer}; not supported"
            )
        routers[layer] = f"{parent}.{child}", children[child]
    if not routers:
        raise ValueError(f"model must have routers beside experts, got none in {type(base).__name__}; use a MoE model")
    return routers
