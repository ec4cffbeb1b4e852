"""A worker extension for vLLM's CPU build, whose experts are otherwise wrong after every weight update.

vLLM 0.32 packs the experts for its CPU kernels when it builds the kernel and not when weights come again
(UnquantizedFusedMoEMethod._setup_kernel), so an update leaves plain weights in a packed layout. To drop once it does.
"""

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

_setup_kernel = UnquantizedFusedMoEMethod._setup_kernel


def _setup_and_pack(self, layer, *args, **kwargs):
    is_update = self.moe_kernel is not None
    _setup_kernel(self, layer, *args, **kwargs)
    if is_update and current_platform.is_cpu():
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


UnquantizedFusedMoEMethod._setup_kernel = _setup_and_pack


class PacksExperts:
    """For ``--worker-extension-cls``, which imports this module in the workers."""
