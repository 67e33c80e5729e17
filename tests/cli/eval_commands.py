"""Evaluating, converting and verifying, as processes: the perplexity of transformers, what conversion keeps and gains.

usage: eval_commands.py PROGRAM
"""

import json
import math
import pathlib
import subprocess
import sys
import sysconfig
import unittest

import torch
import transformers
from tokenizers import Tokenizer

from decode_case import FAMILIES, NOVEL, PROGRAM, ROOT, SMALL, TEXTS, DecodeCase, set_inner_norm_eps


class Evaluate(DecodeCase):
    def perplexity(self, path, model, text, size):
        """Of transformers, over ten windows."""
        ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text.read_text(), add_special_tokens=False).ids
        windows = torch.tensor(ids[: 10 * size]).view(10, size)
        with torch.no_grad():
            log_p = torch.cat([model(w[None]).logits[:, :-1] for w in windows]).double().log_softmax(-1)
        return math.exp(-log_p.gather(2, windows[:, 1:, None]).mean().item())

    def test_perplexity_is_that_of_transformers(self):
        for path, text, size in [(SMALL, pathlib.Path(__file__), 128), (NOVEL, TEXTS / "great-expectations.txt", 512)]:
            if not path.exists():
                continue
            row = self.rows("eval", "--model", path, "--data", text, "--reference", "none", "--sequence", size, "--tokens",
                            10 * (size - 1))[0]
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            self.assertEqual(row["tokens"], 10 * (size - 1))
            self.assertLess(abs(row["perplexity"] / self.perplexity(path, model, text, size) - 1), 1e-4)

    def test_inner_norm_eps_is_that_of_the_norms_of_latents(self):
        path, model = self.family("v3")
        evaluate = ["eval", "--model", path, "--data", __file__, "--reference", "none", "--sequence", 64, "--tokens", 630]
        for eps in (1e-6, 0.5):
            set_inner_norm_eps(model, eps)
            row = self.rows(*evaluate, "--inner-norm-eps", eps)[0]
            self.assertLess(abs(row["perplexity"] / self.perplexity(path, model, pathlib.Path(__file__), 64) - 1), 1e-4)
            self.assertEqual(json.loads((self.folder / "record.json").read_text())["config"]["inner_norm_eps"], eps)
        self.run_program(*evaluate, "--inner-norm-eps", "nan", code=2)

    def test_memory_of_a_window_does_not_grow_with_its_square(self):
        path, _ = self.family("v3")
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
        text = self.folder / "text.txt"
        text.write_text("It was the best of times. " * 200)
        # A process of its own: what starts another counts as that one's, and torch takes more than parlat.
        measure = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
                   "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        kilobytes = []
        for size in (2048, 4096):
            evaluate = [PROGRAM, "eval", "--model", path, "--data", text, "--reference", "none", "--sequence", size, "--tokens",
                        size - 1, "--quiet"]
            kilobytes.append(int(subprocess.check_output([sys.executable, "-c", measure, *map(str, evaluate)], timeout=60)))
        # At 4096, attention of 512 tokens has up to 16 parts each of 16 heads and 32 columns, 17 MB; of all of them 69 MB.
        self.assertLess(kilobytes[1] - kilobytes[0], 32 * 1024)

    def test_rotated_copies_are_read_by_transformers(self):
        text = pathlib.Path(__file__)
        for name in FAMILIES:
            path, model = self.family(name)
            for transform in ("hadamard", "pca"):
                out = self.folder / f"{name}-{transform}"
                self.run_program("convert", "--model", path, "--out", out, "--transform", transform, "--groups", "2,4",
                                 "--calibration", text, "--calibration-tokens", 1024, "--sequence", 128)
                copy, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                                               output_loading_info=True)
                self.assertFalse({key: names for key, names in info.items() if names})
                ids = torch.arange(200).view(2, 100)
                with torch.no_grad():
                    want, got = model(ids).logits, copy.eval()(ids).logits
                self.assertLess(((got - want).abs().max() / want.abs().max()).item(), 1e-4, f"{name} {transform}")
                self.rows("eval", "--model", out, "--data", text, "--layout", "tpla", "--ranks", "local:2",
                          "--sequence", 64, "--tokens", 100)

    def test_balanced_slices_lose_least(self):
        stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
        calibration = [stdlib / "argparse.py", stdlib / "tarfile.py"]
        kl = {2: {}, 4: {}}
        for transform in ("hadamard", "pca", "balanced"):
            out = self.folder / transform
            self.run_program("convert", "--model", SMALL, "--out", out, "--transform", transform, "--groups", "2,4",
                             "--calibration", *calibration, "--calibration-tokens", 4096, "--sequence", 128,
                             "--fit-steps", 30)
            layouts = "tpla,gla" if transform == "balanced" else "tpla"  # gla: of the model as it is
            for groups in kl:
                for row in self.rows("eval", "--model", out, "--data", stdlib / "ast.py", "--layouts", layouts, "--ranks",
                                     f"local:{groups}", "--sequence", 256, "--tokens", 1500):
                    kl[groups][transform if row["layout"] == "tpla" else "gla"] = row["kl"]
        for of_groups in kl.values():
            self.assertLess(of_groups["balanced"], 0.5 * of_groups["pca"], kl)
            self.assertLess(max(of_groups["pca"], of_groups["hadamard"]), of_groups["gla"], kl)

    def test_counting_begins_at_the_same_token_in_both_modes(self):
        path, _ = self.family("v3")
        evaluate = ["--model", path, "--data", __file__, "--ranks", "local:2", "--sequence", 64, "--tokens", 300]
        for more, each in [([], 48), (["--copied"], 32)]:
            exact, sliced = [self.rows("eval", *evaluate, "--layout", "mla", "--prompt", 16, "--prefill", mode, *more)[0]
                             for mode in ("exact", "sliced")]
            self.assertEqual((exact["tokens"], sliced["tokens"]), (300, 300))
            self.assertLess(abs(exact["loss"] - sliced["loss"]), 1e-4)  # mla is exact either way
            record = json.loads((self.folder / "record.json").read_text())
            self.assertEqual(record["config"]["counted_from"], 64 - each)

    @unittest.skipUnless(PROGRAM == ROOT / "build/release/parlat", "bench_slicing runs the release build")
    def test_bench_slicing_counts_the_same_tokens_in_both_modes_and_says_what_it_ran(self):
        file = self.folder / "slicing.json"
        subprocess.run([sys.executable, str(ROOT / "scripts/bench_slicing"), "--groups", "2", "--tokens", "50", "--sequence",
                        "32", "--calibration-tokens", "512", "--fit-steps", "0", "--json", str(file)], check=True,
                       capture_output=True, timeout=300)
        record = json.loads(file.read_text())
        self.assertLessEqual({"version", "commit", "machine", "config", "rows"}, set(record))
        self.assertEqual({row["transform"] for row in record["rows"]}, {"none", "hadamard", "pca", "balanced"})
        perplexity = {(row["text"], row["prefill"]): row["perplexity"] for row in record["rows"] if row["layout"] == "mla"}
        for text in ("text", "copied"):  # of mla, which is exact either way
            self.assertLess(abs(perplexity[text, "exact"] / perplexity[text, "sliced"] - 1), 1e-4)

    def test_slices_by_their_own_norm_leave_exact_positions_exact(self):
        path, _ = self.family("v3")
        evaluate = ["eval", "--data", __file__, "--layout", "tpla", "--ranks", "local:2", "--sequence", 64, "--prefill",
                    "exact", "--prompt", 63, "--tokens", 10, "--model"]
        row = self.rows(*evaluate, path)[0]
        self.assertEqual((row["slices"], row["transform"], row["cache_dtype"]), ("", "none", "fp32"))
        self.assertIn("slice-norm: expected", self.run_program(*evaluate, path, "--slice-norm", code=2).stderr)
        out = self.folder / "pca"
        self.run_program("convert", "--model", path, "--out", out, "--transform", "pca", "--groups", 2, "--calibration",
                         __file__, "--calibration-tokens", 512, "--sequence", 64)
        row = self.rows(*evaluate, out, "--slice-norm")[0]
        self.assertLess(abs(row["kl"]), 1e-8)  # what fp32 leaves, squared

    def test_a_sliced_reference_has_the_groups_that_are_asked_for(self):
        path, _ = self.family("v3")
        row = self.rows("eval", "--model", path, "--data", __file__, "--layout", "tpla", "--reference", "tpla", "--groups", 2,
                        "--ranks", "local:4", "--sequence", 64, "--tokens", 63)[0]
        self.assertEqual((row["kl"], row["agreement"]), (0, 1))

    def test_converted_models_of_more_layers_than_are_verified(self):
        path, _ = self.family("v3")
        out = self.folder / "pca"
        self.run_program("convert", "--model", path, "--out", out, "--transform", "pca", "--groups", 2, "--calibration",
                         __file__, "--calibration-tokens", 512, "--sequence", 64)
        for dtype in ("fp32", "bf16"):
            rows = self.rows("verify", "--model", out, "--dtype", dtype, "--sequence", 8, "--batch", 1, "--documents", 1,
                             "--forms", "laga", "--ranks", "local:2")
            layouts = [row for row in rows if "layout" in row]
            self.assertEqual([row["ok"] for row in layouts], [True] * 5)
            for row in layouts:  # what is allowed is not far from what is found
                self.assertLess(row["tolerance"], 40 * row["max_error"])
        row = self.rows("eval", "--model", out, "--data", __file__, "--layout", "tpla", "--ranks", "local:2", "--sequence", 64,
                        "--tokens", 63, "--cache-dtype", "bf16")[0]
        self.assertEqual((row["slices"], row["transform"], row["cache_dtype"]),
                         (str(out / "slices-2.safetensors"), "pca", "bf16"))

    def test_slices_are_fitted_to_the_model_with_the_eps_that_is_asked_for(self):
        path, _ = self.family("v3")
        slices = []
        for eps in ("1e-6", "0.5"):
            out, record = self.folder / f"eps-{eps}", self.folder / "convert.json"
            self.run_program("convert", "--model", path, "--out", out, "--calibration", __file__, "--calibration-tokens", 256,
                             "--sequence", 64, "--fit-steps", 0, "--inner-norm-eps", eps, "--json", record)
            self.assertEqual(json.loads(record.read_text())["config"]["inner_norm_eps"], float(eps))
            slices.append((out / "slices-2.safetensors").read_bytes())
        self.assertNotEqual(*slices)

    def test_layouts_take_what_inspect_predicts_and_verify_checks_them_on_any_ranks(self):
        path, _ = self.family("v3")
        record = self.folder / "inspect.json"
        self.run_program("inspect", "--model", path, "--json", record)
        predicted = {(row["layout"], row["groups"], row["ranks"]): row["cache_bytes_per_token"]
                     for row in json.loads(record.read_text())["config"]["predicted_cache"]}
        for row in self.rows("eval", "--model", path, "--data", __file__, "--layouts", "mla,gla,tpla,dcp,tpla-dcp",
                             "--groups", 2, "--ranks", "local:4", "--cache-dtype", "bf16", "--sequence", 32, "--tokens", 31):
            self.assertEqual(row["cache_bytes_per_token"], predicted[row["layout"], row["groups"], 4])

        verify = ["verify", "--model", path, "--sequence", 8, "--batch", 1, "--documents", 1, "--ranks"]
        rows = self.rows(*verify, "local:3")
        layouts = [(row["layout"], row["groups"], row["ok"]) for row in rows if "layout" in row]
        self.assertEqual(layouts, [("mla", 1, True), ("gla", 3, True), ("tpla", 3, True), ("dcp", 1, True),
                                   ("tpla-dcp", 3, True)])
        done = self.run_program(*verify, "local:2", "--dtype", "fp64")
        self.assertTrue(done.stdout.endswith("\nlayouts: left out, since decoding has no fp64\n"), done.stdout)
        done = self.run_program(*verify, "local:1")
        for layout in ("gla", "tpla", "tpla-dcp"):
            self.assertRegex(done.stdout, rf"{layout} +- +1 +- +- +left out: slices need 2 ranks\n")


if __name__ == "__main__":
    unittest.main()
