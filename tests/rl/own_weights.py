"""An engine with weights of its own, as a server has, for rollouts ahead of the update."""

import copy
import threading

from tiny import tokenizer

from grpo_moe.rollout.native import NativeEngine


class OwnWeights:
    """As a server: generates from a copy that new weights reach when they are sent."""

    in_process = False

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.engine = NativeEngine(self.model, tokenizer())
        self.busy = self.fails_at = None
        self.calls, self.sent = [], 0

    def generate(self, prompts, sampling):
        self.busy = threading.current_thread() is not threading.main_thread()
        self.calls.append(([p.index for p in prompts], sampling.seed, self.sent, self.busy))
        try:
            if len(self.calls) == self.fails_at:
                raise ConnectionError("the server is gone")
            return self.engine.generate(prompts, sampling)
        finally:
            self.busy = False

    def sync_weights(self, model):
        assert not self.busy
        self.sent += 1
        self.model.load_state_dict(model.state_dict())
