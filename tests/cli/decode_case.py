"""What the tests of commands that decode share: small models made by transformers, and running the program on them.

examples/small is a trained model, and where shared/models lies beside the checkout, the one there is used too.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
warnings.simplefilter("ignore", FutureWarning)
PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared"
SMALL = ROOT / "examples/small"
NOVEL = SHARED / "models/novel"
TEXTS = SHARED / "data/novels"
COMMON = dict(
    vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=8, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, kv_lora_rank=32,
    max_position_embeddings=512, moe_intermediate_size=24, first_k_dense_replace=1, n_shared_experts=1,
    num_experts_per_tok=3, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=0.707, mscale_all_dim=0.707, beta_fast=32,
            beta_slow=1, original_max_position_embeddings=16)
FAMILIES = {
    "v2": transformers.DeepseekV2Config(**COMMON, q_lora_rank=None, n_routed_experts=6, topk_method="greedy",
                                        norm_topk_prob=False, rope_parameters=YARN),
    "v3": transformers.DeepseekV3Config(**COMMON, q_lora_rank=20, n_routed_experts=12, n_group=3, topk_group=2,
                                        routed_scaling_factor=2.5, norm_topk_prob=True),
}


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def set_inner_norm_eps(model, eps):
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = eps


class DecodeCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def family(self, name):
        path = self.folder / name
        torch.manual_seed(3)
        config = FAMILIES[name]
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(path)
        byte_tokenizer().save(str(path / "tokenizer.json"))
        return path, model

    def run_program(self, *arguments, code=0):
        done = subprocess.run([str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, code, done.stderr[-2000:])
        return done

    def rows(self, command, *arguments):
        record = self.folder / "record.json"
        self.run_program(command, *arguments, "--json", record, "--quiet")
        parsed = json.loads(record.read_text())
        self.assertEqual(parsed["machine"]["isa"], torch.backends.cpu.get_cpu_capability())
        return parsed["rows"]
