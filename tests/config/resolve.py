"""Resolves config.json files as transformers does: every file of the folder argv[1] into the JSON file argv[2]."""

import json
import pathlib
import sys

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

KEYS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
        "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "tie_word_embeddings",
        "max_position_embeddings", "initializer_range", "rope_interleave", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group", "topk_method",
        "norm_topk_prob", "routed_scaling_factor", "embedding_initializer_range"]


def resolve(path):
    fields = json.loads(path.read_text())
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
        frequencies = frequencies.tolist()
    else:
        width = config.qk_rope_head_dim
        frequencies, amplitude = [rope["rope_theta"] ** (-i / width) for i in range(0, width, 2)], 1.0
    return {
        "keys": {key: getattr(config, key) for key in KEYS if hasattr(config, key)},
        "inverse_frequencies": frequencies,
        "amplitude": amplitude,
        "softmax_scale": yarn_apply_mscale(rope, config.qk_head_dim**-0.5),
    }


folder, out = map(pathlib.Path, sys.argv[1:])
out.write_text(json.dumps({path.stem: resolve(path) for path in folder.glob("*.json")}))
