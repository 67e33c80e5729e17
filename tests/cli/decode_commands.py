"""Generating text, as a process: the same tokens as transformers, the text of runs that end early, bad requests.

usage: decode_commands.py PROGRAM
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import unittest

import torch
import transformers
from safetensors.torch import load_file, save_file

from decode_case import FAMILIES, NOVEL, PROGRAM, SMALL, DecodeCase, set_inner_norm_eps


class Generate(DecodeCase):
    def greedy(self, model, prompt, tokens):
        """What transformers would write after the prompt and each of the tokens; the tokens, if they are its own."""
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.argmax(-1).tolist()

    def expect_same_tokens(self, path, model, prompts, count, runs):
        given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
        want = None
        for layout, ranks in runs:
            rows = self.rows("generate", "--model", path, *given, "--new-tokens", count, "--ignore-end", "--layout",
                             layout, "--ranks", f"local:{ranks}")
            want = want or [self.greedy(model, row["prompt_tokens"], row["tokens"]) for row in rows]
            for row, tokens in zip(rows, want, strict=True):
                self.assertEqual(len(row["tokens"]), count)
                self.assertEqual(row["tokens"], tokens, f"{path.name}, {layout} on {ranks}, request {row['request']}")

    def test_greedy_tokens_are_those_of_transformers(self):
        prompts = ["a", "def f(x):\n    return x", "It was the best of times, it was the worst of times. " * 3, "no", "12"]
        for name in FAMILIES:
            path, model = self.family(name)
            self.expect_same_tokens(path, model, prompts[1:2], 60, [("mla", 1), ("dcp", 8)])
            self.expect_same_tokens(path, model, prompts, 40, [("mla", 2), ("mla", 3), ("dcp", 4)])

    def test_trained_models_write_as_in_transformers(self):
        small = ["def main(", "import os\n", "    return self.", "x", "class Parser:\n"]
        grid = [(layout, ranks) for layout in ("mla", "dcp") for ranks in (1, 2, 3, 4, 8)]
        novel = ["It was", "My father's family name being Pirrip, and my Christian name Philip, my", "Chapter 1\n\n",
                 "said Joe", "The marshes"]
        for path, prompts, runs in [(SMALL, small, grid), (NOVEL, novel, [("mla", 3), ("dcp", 4)])]:
            if path.exists():
                model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
                self.expect_same_tokens(path, model, prompts[1:2], 200, runs)
                self.expect_same_tokens(path, model, prompts, 200, runs)

    def test_sampling_repeats_and_follows_the_seed(self):
        path, _ = self.family("v3")
        tokens = lambda *more: self.rows("generate", "--model", path, "--prompt", "x", "--new-tokens", 30,
                                         "--temperature", 1, *more)[0]["tokens"]
        self.assertEqual(tokens("--seed", 5), tokens("--seed", 5, "--ranks", "local:2", "--layout", "dcp"))
        self.assertNotEqual(tokens("--seed", 5), tokens("--seed", 6))

    def test_inner_norm_eps_is_that_of_the_norms_of_latents(self):
        path, model = self.family("v3")
        generate = ["generate", "--model", path, "--prompt", "It was", "--new-tokens", 20, "--ignore-end"]
        usual = self.rows(*generate)[0]["tokens"]
        set_inner_norm_eps(model, 0.5)
        row = self.rows(*generate, "--inner-norm-eps", 0.5)[0]
        self.assertEqual(row["tokens"], self.greedy(model, row["prompt_tokens"], row["tokens"]))
        self.assertNotEqual(row["tokens"], usual)
        self.assertEqual(json.loads((self.folder / "record.json").read_text())["config"]["inner_norm_eps"], 0.5)
        self.run_program(*generate, "--inner-norm-eps", 1, code=2)

    def mpirun(self, ranks, *arguments):
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *root, "--oversubscribe", "-n", str(ranks), str(PROGRAM), *map(str, arguments), "--ranks", "mpi"]

    def test_separate_prefill_ranks_change_nothing(self):
        path, _ = self.family("v3")
        common = ["--model", path, "--prompt", "It was", "--prompt", "def f(x):", "--new-tokens", 20, "--ignore-end"]
        want = [row["tokens"] for row in self.rows("generate", *common, "--layout", "tpla", "--ranks", "local:2")]
        got = self.rows("generate", *common, "--layout", "tpla", "--ranks", "local:5", "--prefill-ranks", 3)
        self.assertEqual([row["tokens"] for row in got], want)
        self.run_program("generate", *common, "--ranks", "local:2", "--prefill-ranks", 2, code=2)

    def rows_under_mpi(self, ranks, *arguments):
        record = self.folder / "mpi.json"
        subprocess.run(self.mpirun(ranks, *arguments, "--json", record, "--quiet"), check=True, capture_output=True,
                       timeout=120)
        return json.loads(record.read_text())["rows"]

    @unittest.skipUnless(shutil.which("mpirun"), "no MPI here")
    def test_processes_write_what_threads_write(self):
        path, _ = self.family("v3")
        for layout, ranks, more in [("dcp", 3, []), ("tpla", 4, ["--groups", 2]), ("tpla", 4, ["--prefill-ranks", 2])]:
            arguments = ["generate", "--model", path, "--prompt", "It was", "--new-tokens", 20, "--ignore-end",
                         "--layout", layout, *more]
            want = self.rows(*arguments, "--ranks", f"local:{ranks}")[0]["tokens"]
            self.assertEqual(self.rows_under_mpi(ranks, *arguments)[0]["tokens"], want, f"{layout} {more}")

    @unittest.skipUnless(shutil.which("mpirun"), "no MPI here")
    def test_processes_that_prefill_may_be_fewer_or_more_than_those_that_decode(self):
        path, _ = self.family("v3")
        generate = ["generate", "--model", path, "--ignore-end", "--new-tokens", 20]
        for prompt in ("It was", "x", "def f(x):\n    return x"):
            generate += ["--prompt", prompt]
        tokens = lambda rows: [row["tokens"] for row in rows]
        one = tokens(self.rows(*generate))
        for layout, prefill, decode in [("mla", 1, 2), ("mla", 3, 2), ("dcp", 1, 3), ("dcp", 3, 2), ("tpla", 3, 2)]:
            # The exact layouts are held to one rank, slices to the ranks that decode them.
            want = one
            if layout == "tpla":
                want = tokens(self.rows(*generate, "--layout", layout, "--ranks", f"local:{decode}"))
            got = self.rows_under_mpi(prefill + decode, *generate, "--layout", layout, "--prefill-ranks", prefill)
            self.assertEqual(tokens(got), want, f"{layout}: {prefill} ranks prefill, {decode} decode")

    def ended_early(self, command, end):
        """Runs generate for two prompts until both have text, then end(process): its exit code and stderr."""
        path, _ = self.family("v3")
        arguments = ["generate", "--model", path, "--prompt", "x", "--prompt", "It was", "--ignore-end", "--quiet"]
        whole = subprocess.run([*map(str, [PROGRAM, *arguments, "--new-tokens", 40])], stdout=subprocess.PIPE, check=True,
                               timeout=60).stdout
        run = subprocess.Popen(command(*arguments, "--new-tokens", 450), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = run.stdout.read(64)  # some tokens of the first prompt; the second has run meanwhile
        end(run)
        out, err = run.communicate(timeout=60)
        out = first + out
        self.assertRegex(out, b"(?s)^--- 0\n.+\n--- 1\n.+\n$")
        # As far as they are, the texts of a run that nobody ended.
        for got, want in zip(out.split(b"--- 1\n"), whole.split(b"--- 1\n"), strict=True):
            shorter = min(len(got), len(want)) - 1
            self.assertEqual(got[:shorter], want[:shorter])
        return run.returncode, err.decode()

    @unittest.skipUnless(shutil.which("mpirun"), "no MPI here")
    def test_a_killed_rank_ends_the_others_and_the_text_so_far_stays(self):
        def kill_rank_1(run):
            children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout
            for child in children.split():
                if b"OMPI_COMM_WORLD_RANK=1\0" in pathlib.Path(f"/proc/{child}/environ").read_bytes():
                    os.kill(int(child), signal.SIGKILL)

        code, err = self.ended_early(lambda *arguments: self.mpirun(2, *arguments), kill_rank_1)
        self.assertEqual(code, 128 + signal.SIGKILL)
        self.assertRegex(" ".join(err.split()), "process rank 1 with PID .* exited on signal 9")

    def test_an_interrupt_leaves_the_text_so_far(self):
        command = lambda *arguments: [*map(str, [PROGRAM, *arguments, "--ranks", "local:2"])]
        code, err = self.ended_early(command, lambda run: run.send_signal(signal.SIGINT))
        self.assertEqual((code, err), (130, ""))

    def expect_refusals(self, requests):
        for code, words, arguments in requests:
            done = self.run_program(*arguments, "--quiet", code=code)
            self.assertRegex(done.stderr, "^(parlat: warning: [^\n]*\n)*parlat: error: [^\n]*\n$")
            self.assertIn(words, done.stderr)

    def test_bad_requests_get_one_line(self):
        path, _ = self.family("v3")
        broken = self.folder / "broken"
        shutil.copytree(path, broken)
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        no_tokenizer = self.folder / "no-tokenizer"
        shutil.copytree(path, no_tokenizer)
        (no_tokenizer / "tokenizer.json").unlink()
        self.run_program("convert", "--model", SMALL, "--out", self.folder / "other", "--transform", "pca", "--groups", 2,
                         "--calibration", __file__, "--calibration-tokens", 512, "--sequence", 64)
        foreign = self.folder / "other/slices-2.safetensors"
        damaged = self.folder / "damaged-slices-2.safetensors"
        damaged.write_bytes(foreign.read_bytes()[:-3] + b"\x11\x22\x33")
        nan = self.folder / "nan"
        shutil.copytree(path, nan)
        tensors = load_file(nan / "model.safetensors")
        tensors["model.norm.weight"][5] = float("nan")
        save_file(tensors, nan / "model.safetensors")
        empty = self.folder / "empty.txt"
        empty.write_text("")
        empty_lines = self.folder / "lines.txt"
        empty_lines.write_text("\n" * 100)
        generate = ["generate", "--prompt", "x", "--new-tokens", 3, "--model"]
        evaluate = ["eval", "--data", __file__, "--model", path]
        convert = ["convert", "--model", path, "--calibration", __file__, "--sequence", 64, "--out"]
        self.expect_refusals([
            (2, "expected one of mla, gla, tpla, dcp, tpla-dcp, got 'mlp'", [*generate, path, "--layout", "mlp"]),
            (2, "groups that divide the 3 ranks, got 2", [*generate, path, "--layout", "tpla", "--groups", 2, "--ranks",
                                                          "local:3"]),
            (2, "at most 8 ranks", [*generate, path, "--ranks", "local:9"]),
            (2, "at most the latent's 32 columns as groups, got 33",
             [*generate, path, "--layout", "tpla", "--ranks", "local:33"]),
            (2, "expected exact or sliced", [*generate, path, "--prefill", "some"]),
            (2, "expected fp32 or bf16", [*generate, path, "--dtype", "fp16"]),
            (2, "temperature", [*generate, path, "--temperature", "-1"]),
            (2, "fewer tokens than the context of 512", ["generate", "--model", path, "--prompt", "x" * 600]),
            (3, "tokenizer.json", [*generate, no_tokenizer]),
            (3, "model.safetensors", [*generate, broken]),
            (3, "nowhere", [*generate, self.folder / "nowhere"]),
            (3, "empty.txt", ["eval", "--data", empty, "--model", path]),
            (3, "no safetensors file", [*evaluate, "--layout", "tpla", "--ranks", "local:2", "--slices", __file__]),
            (2, "sequence", [*evaluate, "--sequence", 1000]),
            (2, "sequence: expected an even number of tokens with --copied, got 33",
             [*evaluate, "--sequence", 33, "--prompt", 32, "--copied"]),
            (2, "fewer tokens than the window", [*evaluate, "--sequence", 64, "--prefill", "exact", "--prompt", 64]),
            (2, "prefill-ranks: expected --prefill exact with it, got sliced",
             [*generate, path, "--ranks", "local:2", "--prefill-ranks", 1, "--prefill", "sliced"]),
            (2, "got 'mlp'", [*evaluate, "--layouts", "mla,mlp", "--sequence", 64]),
            (3, f"{nan}: expected weights that give finite logits, got nan", [*generate, nan]),
            (3, f"{nan}: expected weights that give finite logits, got nan", ["eval", "--data", __file__, "--model", nan]),
            (3, "slices-2.safetensors: tensors: expected a checksum of ",
             ["eval", "--data", __file__, "--model", self.folder / "other", "--layout", "tpla", "--ranks", "local:2",
              "--sequence", 64, "--slices", damaged]),
            (3, "of another model", ["eval", "--data", __file__, "--model", SMALL, "--layout", "tpla", "--ranks",
                                     "local:2", "--sequence", 64, "--slices", foreign]),
            (2, "expected one of hadamard, pca, balanced", [*convert, self.folder / "o", "--transform", "x"]),
            (2, "every number once, got 2 2 times", [*convert, self.folder / "o", "--groups", "2,2"]),
            (2, "inner-norm-eps: expected a number above 0 and below 1, got 2", [*convert, self.folder / "o", "--inner-norm-eps", 2]),
            (2, "more tokens for pca than the latent's 32 columns, got 4",
             [*convert, self.folder / "o", "--transform", "pca", "--sequence", 4, "--calibration-tokens", 4]),
            (3, "at least one window of 512 tokens in the calibration texts, got none",
             ["convert", "--model", path, "--out", self.folder / "o", "--calibration", empty_lines]),
            (3, "/proc/slices-2.safetensors: cannot be created", [*convert, "/proc"]),
        ])

    def test_what_model_or_machine_cannot_do_gets_one_line(self):
        path, _ = self.family("v3")
        wanted_ends = "eos_token_id: expected null or tokens from 0 to 299"
        ends = {}
        for name, token in [("outside", 300), ("text", "</s>"), ("list", [1, -1])]:
            ends[name] = self.folder / f"end-{name}"
            shutil.copytree(path, ends[name])
            file = ends[name] / ("generation_config.json" if name == "list" else "config.json")
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": token}))
        endless = self.folder / "endless"
        shutil.copytree(path, endless)
        config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 10**12}
        (endless / "config.json").write_text(json.dumps(config))
        generate = ["generate", "--prompt", "x", "--new-tokens", 3, "--model"]
        self.expect_refusals([
            (2, "prompt: expected UTF-8 text, got byte 0xff at offset 1",
             ["generate", "--model", path, "--prompt", os.fsdecode(b"x\xff")]),
            (2, f"/config.json: {wanted_ends}, got 300", [*generate, ends["outside"]]),
            (2, f'/config.json: {wanted_ends}, got "</s>"', [*generate, ends["text"]]),
            (2, f"/generation_config.json: {wanted_ends}, got [1,-1]", [*generate, ends["list"]]),
            (2, "cache: expected at most this machine's memory of",
             ["generate", "--model", endless, "--prompt", "x", "--new-tokens", 10**12]),
            (2, "cache: expected at most this machine's memory of",
             ["bench", "decode", "--model-config", "tiny", "--context", 10**9, "--batch", 1000]),
            (2, "new-tokens", ["generate", "--model", path, "--prompt", "x", "--new-tokens", -1]),
        ])

    def test_text_that_cannot_be_printed(self):
        path, _ = self.family("v3")
        with open("/dev/full", "w") as full:
            for more in ([], ["--prompt", "y"], ["--ranks", "local:2"]):
                command = [PROGRAM, "generate", "--model", path, "--prompt", "x", "--new-tokens", "3", "--quiet", *more]
                failed = subprocess.run([*map(str, command)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual((failed.returncode, failed.stderr),
                                 (3, "parlat: error: stdout: cannot be written: No space left on device\n"))

    def test_an_empty_prompt_and_the_end_of_the_context_are_no_accidents(self):
        path, model = self.family("v2")
        row = self.rows("generate", "--model", path, "--prompt", "x" * 500, "--new-tokens", 100, "--ignore-end")[0]
        self.assertEqual((len(row["tokens"]), row["finish"]), (12, "context limit"))
        empty = ["generate", "--model", path, "--prompt", "", "--new-tokens", 20, "--ignore-end"]
        self.expect_refusals([(2, f"{path}/tokenizer.json: expected an end of document", empty)])
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 7}))
        row = self.rows(*empty)[0]
        self.assertEqual(row["prompt_tokens"], [7])
        self.assertEqual(row["tokens"], self.greedy(model, [7], row["tokens"]))


if __name__ == "__main__":
    unittest.main()
