"""Writes a small random model of every family as its checkpoint lies on the hub, and what transformers computes with it.

usage: families.py FOLDER

One folder a family: config.json under the keys and the model type that the hub's file has, model.safetensors (fp32,
with a multi-token-prediction layer where the family has one), and expected.safetensors: tokens [B, S] and logits
[B, S, vocabulary] in fp64, made as those of tests/fixtures are.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "fixtures"))
from generate import BATCH, SEQUENCE, WIDTHS, InDouble, make_model, off_ties, randomise, widened, yarn

ONE_GROUP = dict(n_group=1, topk_group=1, norm_topk_prob=True)
# Each: transformers' model type, what differs from WIDTHS, and what the hub's file says otherwise.
FAMILIES = {
    "deepseek_v2": ("deepseek_v2", dict(
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)), {}),
    "deepseek_v2_lite": ("deepseek_v2", dict(
        topk_method="greedy", q_lora_rank=None, routed_scaling_factor=1.0,
        rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707)), dict(n_group=1, topk_group=1)),
    "deepseek_v3": ("deepseek_v3", dict(
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1,
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)), dict(num_nextn_predict_layers=1)),
    # transformers has no class of its own for it.
    "kimi_k2": ("deepseek_v3", dict(
        ONE_GROUP, num_attention_heads=6, num_key_value_heads=6, n_routed_experts=12, n_shared_experts=1,
        routed_scaling_factor=2.827,
        rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=32.0, original_max_position_embeddings=64,
                             mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0)),
        dict(model_type="kimi_k2", num_nextn_predict_layers=0)),
    "moonlight": ("deepseek_v3", dict(
        ONE_GROUP, q_lora_rank=None, routed_scaling_factor=2.446,
        rope_parameters=dict(rope_type="default", rope_theta=50000.0)), dict(num_nextn_predict_layers=0)),
    "youtu": ("youtu", dict(
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1600000.0)), {}),
}
EXPERT_KEYS = {"moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
               "first_k_dense_replace"}


def family_config(model_type, changes):
    widths = {key: size for key, size in WIDTHS.items() if model_type != "youtu" or key not in EXPERT_KEYS}
    return transformers.AutoConfig.for_model(model_type, **{**widths, **changes})


def as_on_the_hub(path, hub):
    """rope_theta and rope_scaling with `type` instead of rope_parameters, but for youtu."""
    config = json.loads(path.read_text())
    if config["model_type"] != "youtu":
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps({**config, **hub}))


def add_prediction_layer(path, layers):
    """The layer after the last: a copy of it, and what joins it to the model."""
    tensors = load_file(path)
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[extra + name[len(last):]] = tensors[name].clone()
    width = tensors["model.norm.weight"].numel()
    for name, shape in [("eh_proj.weight", (width, 2 * width)), ("enorm.weight", (width,)), ("hnorm.weight", (width,)),
                        ("shared_head.norm.weight", (width,))]:
        tensors[extra + name] = torch.full(shape, torch.nan)
    tensors[extra + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[extra + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})


def write(folder, model_type, changes, hub):
    config = family_config(model_type, changes)
    for seed in range(100):
        torch.manual_seed(seed)
        model = make_model(config)
        randomise(model, config)
        tokens = torch.randint(config.vocab_size, (BATCH, SEQUENCE))
        if off_ties(model, config, tokens):
            break
    else:
        raise SystemExit(f"{folder.name}: every seed leaves a router near a tie")
    model.save_pretrained(folder)
    as_on_the_hub(folder / "config.json", hub)
    if hub.get("num_nextn_predict_layers"):
        add_prediction_layer(folder / "model.safetensors", config.num_hidden_layers)
    with InDouble(), torch.no_grad():
        logits = widened(model, config)(tokens).logits
    assert logits.dtype == torch.float64
    save_file({"tokens": tokens, "logits": logits}, folder / "expected.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (model_type, changes, hub) in FAMILIES.items():
        write(pathlib.Path(sys.argv[1]) / name, model_type, changes, hub)
