"""Which kind of module and which layer a parameter belongs to, by its name.

Names are those of the Hugging Face models; a LoRA parameter counts to the module that it adapts.
"""

from __future__ import annotations

import re

KINDS = ("attention", "mlp", "embedding", "norm", "other")
_WORDS = (
    ("norm", ("norm", "ln_", "layernorm")),  # first: input_layernorm lies in no attention, q_norm is a norm
    ("embedding", ("embed", "wte", "wpe", "lm_head")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp", ("mlp", "feed_forward", "ffn", "fc1", "fc2", "gate_proj", "up_proj", "down_proj")),
)


def module_kind(name: str) -> str:
    """Returns the kind of the module that the parameter of this name belongs to, one of KINDS.

    >>> module_kind("model.layers.0.self_attn.q_proj.weight")
    'attention'
    """
    for kind, words in _WORDS:
        if any(word in name for word in words):
            return kind
    return "other"


def layer(name: str) -> str:
    """Returns the number of the layer that the parameter of this name belongs to; outside of layers, its kind.

    >>> layer("model.layers.11.mlp.up_proj.lora_A.default.weight"), layer("model.norm.weight")
    ('11', 'norm')
    """
    number = re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", name)
    return number.group(1) if number else module_kind(name)
