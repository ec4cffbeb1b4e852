"""GPT-OSS-Lite: a 12-layer mixture-of-experts language model, registered with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import GptOssLiteConfig
from .modeling import GptOssLiteForCausalLM, GptOssLiteModel

AutoConfig.register(GptOssLiteConfig.model_type, GptOssLiteConfig, exist_ok=True)
AutoModel.register(GptOssLiteConfig, GptOssLiteModel, exist_ok=True)
AutoModelForCausalLM.register(GptOssLiteConfig, GptOssLiteForCausalLM, exist_ok=True)

from_original = GptOssLiteForCausalLM.from_original
to_original_state_dict = GptOssLiteForCausalLM.to_original_state_dict

__all__ = [
    "GptOssLiteConfig",
    "GptOssLiteForCausalLM",
    "GptOssLiteModel",
    "from_original",
    "to_original_state_dict",
]
