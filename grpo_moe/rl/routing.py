"""What training does with the routers of an MoE policy: replayed routes, the load-balancing loss, and their metrics."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from grpo_moe.adapters.routing import (
    RoutingRecord,
    RoutingReplay,
    dead_experts,
    freeze_routers,
    has_experts,
    max_violation,
)
from grpo_moe.text import say
from grpo_moe.types import RolloutBatch

from .config import GRPOConfig
from .metrics import Metrics

_IDLE = {"routing_replay": "none", "freeze_router": False, "router_aux_loss_coef": 0}
"""Options that need routers, and where they do not."""
_OPEN: weakref.WeakKeyDictionary[PreTrainedModel, RoutingReplay] = weakref.WeakKeyDictionary()
"""The hooks of the last trainer of a model: the next one's take their place."""


def close_routing(policy: PreTrainedModel) -> None:
    """Removes the hooks that an earlier :class:`PolicyRouting` left on the policy."""
    if policy in _OPEN:
        _OPEN.pop(policy).close()


@dataclass
class Routed:
    """What a forward of the policy left behind."""

    aux_loss: torch.Tensor | float = 0.0
    """This micro-batch's share of the window's load-balancing loss, with gradient."""


class PolicyRouting:
    """The routers of the policy; does nothing for a model without experts.

    Args:
        policy: the model, before it is wrapped or sharded and after copies of it were made.
        args: the options.

    Raises:
        ValueError: an option needs routers, and the policy has none or none that can be replayed.
    """

    def __init__(self, policy: PreTrainedModel, args: GRPOConfig):
        self.policy, self.args, self.replay, self._load = policy, args, None, None
        asked = [name for name in _IDLE if getattr(args, name) != _IDLE[name]]
        if not has_experts(policy):
            if asked:
                raise ValueError(
                    f"{asked[0]} must be {_IDLE[asked[0]]!r} for {type(policy).__name__}, which has no experts, got "
                    f"{getattr(args, asked[0])!r}; leave it out"
                )
            return
        if args.freeze_router:
            freeze_routers(policy)
        close_routing(policy)
        try:
            self.replay = RoutingReplay(policy)
        except ValueError as error:
            self._give_up(error)
            return
        _OPEN[policy] = self.replay
        said = getattr(policy.config.get_text_config(), "router_aux_loss_coef", 0)
        if said and not args.router_aux_loss_coef:
            say(f"router_aux_loss_coef is 0 in training, not the {said} of the model's config; set it to change that")

    def find_rules(self) -> None:
        """Finds the routers' rules by a forward, once the policy is where it will train, sharded or not.

        Raises:
            ValueError: an option needs routers that can be replayed, and these cannot.
        """
        if self.replay is None:
            return
        policy, vocabulary = self.policy, self.policy.config.get_text_config().vocab_size
        try:
            with self.replay.record(), torch.no_grad():  # any forward will do
                policy(input_ids=torch.arange(1, 5, device=policy.device)[None] % vocabulary, use_cache=False)
        except ValueError as error:
            close_routing(policy)
            self._give_up(error)

    def _give_up(self, error: ValueError) -> None:
        """Goes without the routers where no option needs them."""
        args, name = self.args, type(self.policy).__name__
        needing = [
            option for option in ("routing_replay", "router_aux_loss_coef") if getattr(args, option) != _IDLE[option]
        ]
        needing += ["gradient_checkpointing"] if args.gradient_checkpointing else []  # routes again in backward
        if needing:
            raise ValueError(f"{needing[0]} must be off for {name}: {error}") from error
        warnings.warn(f"no metrics of the routing of {name}: {error}", stacklevel=3)
        self.replay = None

    @property
    def checkpointing_kwargs(self) -> dict:
        """For ``gradient_checkpointing_enable``."""
        return {"use_reentrant": False} if self.replay is None else self.replay.checkpointing_kwargs

    @contextmanager
    def scoring(self, batch: RolloutBatch, records: list[RoutingRecord]) -> Iterator[None]:
        """Around a forward of the policy before its updates; leaves routes that updates need in ``records``."""
        kept = self.args.router_aux_loss_coef or self.args.routing_replay == "R2"
        with self._replaying(batch), self.replay.record() if kept else nullcontext() as seen:
            yield
        if seen:
            records.append(self._by_row(seen[0], batch))

    def scored(self, batch: RolloutBatch, records: Sequence[RoutingRecord], order: torch.Tensor) -> RolloutBatch:
        """The batch with what its updates need of the routes that scoring left, whose rows ran in ``order``."""
        if not records:
            return batch
        routes = RoutingRecord.concat_rows(records).rows(order.argsort()).resize(batch.input_ids.shape[1])
        if self.args.router_aux_loss_coef:
            mask = _tokens_in_loss(batch)
            rows = [slice(row, row + 1) for row in range(len(mask))]
            loads = torch.stack([routes.rows(row).expert_load(mask[row]) for row in rows])
            batch = replace(batch, expert_load=loads)
        return replace(batch, routes=routes) if self.args.routing_replay == "R2" else batch

    @contextmanager
    def update(self, batch: RolloutBatch, window, metrics: Metrics) -> Iterator[Routed]:
        """Around a forward of the policy in an update: replays the batch's routes, fills what it yields at the end."""
        routed = Routed()
        if self.replay is None:
            yield routed
            return
        mask = _tokens_in_loss(batch)
        summing = self._summing(mask, batch) if self.args.router_aux_loss_coef else nullcontext()
        with self._replaying(batch), self.replay.record(natural=True) as seen, summing as sums:
            yield routed
        own = self._by_row(seen[0], batch)
        load = (own if batch.routes is None else batch.routes).expert_load(mask)
        self._load = load if self._load is None else self._load + load
        if batch.routes is not None:
            by_layer, anywhere = own.flip_rate(batch.routes, mask)
            metrics.add("routing/flip_rate", by_layer.mean(), mask.sum())
            for layer, rate in zip(own.layers, by_layer, strict=True):
                metrics.add(f"routing/flip_rate_layer_{layer}", rate, mask.sum())
            metrics.add("routing/flipped_tokens", anywhere, mask.sum())
        if sums:
            routed.aux_loss = load_balancing_loss(sums[0], window.expert_load.to(sums[0]), window.num_routed_tokens)
            metrics.add_sum("aux_loss", routed.aux_loss.detach() / self.args.updates_per_rollout)

    def window_counts(self, batch: RolloutBatch, rows: torch.Tensor) -> tuple[torch.Tensor | int, int]:
        """Expert load [L, E] of the rows, and their tokens: to be summed over processes for :class:`Window`."""
        if batch.expert_load is None:
            return 0, 0
        return batch.expert_load[rows].sum(0).cpu(), int(_tokens_in_loss(batch)[rows].sum())

    def finish(self, metrics: Metrics) -> dict[int, list[int]]:
        """Adds the metrics of the expert load of all updates of a step, over all processes; returns it by layer."""
        if self.replay is None:
            return {}
        loads = [load for load in gather_object([None if self._load is None else self._load.cpu()]) if load is not None]
        self._load = None
        if not loads:
            return {}
        load = sum(loads)  # [L, E]
        if not load.any():  # no token took part: there is no balance to speak of
            return {}
        violation = max_violation(load)  # [L]
        metrics.add("routing/max_violation", violation.mean())
        for layer, value in zip(self.replay.layers, violation, strict=True):
            metrics.add(f"routing/max_violation_layer_{layer}", value)
        metrics.add("routing/dead_experts", dead_experts(load).float().mean())
        return dict(zip(self.replay.layers, load.tolist(), strict=True))

    def _by_row(self, record: RoutingRecord, batch: RolloutBatch) -> RoutingRecord:
        return record.unpack(batch.attention_mask) if self.args.padding_free else record

    def _replaying(self, batch: RolloutBatch):
        if batch.routes is None:
            return nullcontext()
        packed = self.args.padding_free
        return self.replay.replay(batch.routes.pack(batch.attention_mask) if packed else batch.routes)

    def _summing(self, mask: torch.Tensor, batch: RolloutBatch):
        if self.args.padding_free:
            mask = mask[batch.attention_mask][None]
        return self.replay.sum_probabilities(mask)


def load_balancing_loss(probabilities: torch.Tensor, expert_load: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """E * sum_e f_e * P_e, mean over the layers: K when balanced, as transformers' function of this name scales it.

    Linear in the probabilities, so that the losses of parts of a window add up to that of the window.

    Args:
        probabilities: [L, E] of the routers, summed over the tokens of a part, with gradient.
        expert_load: [L, E] assignments to each expert over the whole window; f = load / tokens.
        num_tokens: of the whole window; P = probabilities / tokens.

    Source: Switch Transformers, arXiv 2101.03961, section 2.2.
    """
    tokens = max(num_tokens, 1)
    return probabilities.shape[1] * (probabilities / tokens * (expert_load / tokens)).sum(1).mean()


def _tokens_in_loss(batch: RolloutBatch) -> torch.Tensor:
    """[B, S] real tokens of the rows that have a token in the loss."""
    return batch.attention_mask & batch.completion_mask.any(1, keepdim=True)
