"""Every form on 1, 2 and 4 ranks learns real text along the same losses.

Trains a small model for 200 steps through the program, on a novel where shared/data lies beside the checkout and on the
Python standard library's sources elsewhere. fp32 runs of different forms and ranks differ by rounding, which training
amplifies step by step: the first steps must agree to a few roundings of the loss (measured: one), all 200 to some dozen
(measured: two; a step's progress is some ten thousand).

usage: forms_on_text.py PROGRAM
"""

import json
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

STEPS = 200
ROUNDING = 2.0 ** -24  # of fp32, relative
MODEL = {
    "model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 48, "first_k_dense_replace": 2,
    "n_routed_experts": None, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "hidden_act": "silu", "initializer_range": 0.02,
}


def text():
    novel = pathlib.Path(__file__).resolve().parents[3] / "shared/data/novels/pride-and-prejudice.txt"
    if novel.exists():
        return novel
    return pathlib.Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"


def losses(program, folder, form, ranks):
    out = folder / f"{form}-{ranks}"
    subprocess.run(
        [program, "train", "--model-config", str(folder / "config.json"), "--data", str(text()), "--out", str(out),
         "--form", form, "--ranks", f"local:{ranks}", "--sequence", "128", "--batch", "2", "--steps", str(STEPS),
         "--lr", "2e-3", "--warmup", "20", "--seed", "1", "--eval-every", "0", "--checkpoint-every", "0", "--quiet"],
        check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        want = losses(program, folder, "explicit", 1)
        assert len(want) == STEPS, f"expected {STEPS} losses, got {len(want)}"
        assert want[-1] < want[0] - 2, f"the loss went from {want[0]} to {want[-1]} only"
        print(f"{text().name}: explicit on 1 rank {want[0]:.4f} -> {want[-1]:.4f}")
        failed = False
        for form in ("explicit", "absorbed", "laga"):
            for ranks in (1, 2, 4):
                got = want if (form, ranks) == ("explicit", 1) else losses(program, folder, form, ranks)
                apart = [abs(a - b) / b / ROUNDING for a, b in zip(got, want)]
                early, whole = max(apart[:10]), max(apart)
                print(f"{form:9} {ranks} ranks: {got[-1]:.6f}, apart by {early:.1f} roundings in 10 steps, {whole:.1f} in {STEPS}")
                failed |= not (early <= 8 and whole <= 64)
        assert not failed, "the forms do not agree"


if __name__ == "__main__":
    main()
