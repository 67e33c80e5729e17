"""Training as a process: killed and resumed, interrupted, out of disk, badly asked.

usage: train_process.py PROGRAM
"""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import transformers

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
TOKENIZER = pathlib.Path(__file__).resolve().parent.parent / "io/tokenizers/gpt2/tokenizer.json"
MODEL = {
    "model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "hidden_act": "silu", "initializer_range": 0.05,
}
STEPS = 60
EVERY_STEP = ("step", "loss", "grad_norm", "lr", "tokens", "sent_bytes")  # what does not depend on time


class TrainProcess(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "config.json").write_text(json.dumps(MODEL))
        self.text = self.folder / "text.txt"
        self.text.write_text(pathlib.Path(__file__).read_text())

    def command(self, out, *arguments):
        return [str(PROGRAM), "train", "--model-config", str(self.folder / "config.json"), "--data", str(self.text),
                "--out", str(out), "--ranks", "local:2", "--expert-parallel", "2", "--sequence", "32", "--batch", "2",
                "--steps", str(STEPS), "--lr", "3e-3", "--warmup", "5", "--eval-every", "20", "--checkpoint-every", "5",
                "--quiet", *arguments]

    def run_train(self, out, *arguments, **options):
        return subprocess.run(self.command(out, *arguments), capture_output=True, text=True, timeout=120, **options)

    def succeed(self, out, *arguments, **options):
        done = self.run_train(out, *arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def records(self, out):
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in EVERY_STEP if key in line} | {"eval": line.get("eval_loss")} for line in lines]

    def checkpoints(self, out):
        return sorted(path.name for path in (out / "checkpoints").glob("step-*"))

    def wait_for_step(self, process, out, step):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            metrics = out / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count("\n") >= step:
                return
            time.sleep(0.005)
        self.fail(f"the run ended before step {step}")

    def test_killed_at_any_moment(self):
        whole, killed = self.folder / "whole", self.folder / "killed"
        self.succeed(whole)
        seed = random.SystemRandom().randrange(1 << 32)
        moments = random.Random(seed)
        kills = 0
        for step in (2, 15, 35):
            process = subprocess.Popen(self.command(killed, "--resume"), stdout=subprocess.DEVNULL)
            self.wait_for_step(process, killed, step)
            time.sleep(moments.random() * 0.3)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        self.assertGreater(kills, 0, f"seed {seed}")
        self.succeed(killed, "--resume")
        self.assertEqual(self.records(killed), self.records(whole), f"seed {seed}")
        final = "checkpoints/step-000060/model.safetensors"
        self.assertEqual((killed / final).read_bytes(), (whole / final).read_bytes(), f"seed {seed}")
        self.assertEqual(len(self.checkpoints(killed)), 3)

    def test_interrupted(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            out = self.folder / f"run-{number}"
            process = subprocess.Popen(self.command(out, "--steps", "100000"), stdout=subprocess.DEVNULL)
            self.wait_for_step(process, out, 3)
            process.send_signal(number)
            self.assertEqual(process.wait(timeout=30), 130)
            last = [record["step"] for record in self.records(out)][-1]
            self.assertEqual(self.checkpoints(out)[-1], f"step-{last:06d}")

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_one_interrupted_rank_stops_all(self):
        out, process_id = self.folder / "run", self.folder / "process_id"
        rank = f'[ "$OMPI_COMM_WORLD_RANK" != 1 ] || echo $$ > {process_id}; exec "$@"'
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        process = subprocess.Popen(["mpirun", *root, "--oversubscribe", "-n", "2", "sh", "-c", rank, "rank",
                                    *self.command(out, "--ranks", "mpi", "--steps", "100000")],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait_for_step(process, out, 3)
        os.kill(int(process_id.read_text()), signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), 130)
        last = [record["step"] for record in self.records(out)][-1]
        self.assertEqual(self.checkpoints(out)[-1], f"step-{last:06d}")

    def test_full_disk(self):
        whole, full = self.folder / "whole", self.folder / "full"
        self.succeed(whole, "--steps", "10")
        self.succeed(full, "--steps", "5")
        before = {path: path.read_bytes() for path in (full / "checkpoints/step-000005").iterdir()}

        def small_files():  # SIGXFSZ stays ignored, so that writes fail as they do on a full disk
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        failed = self.run_train(full, "--steps", "10", "--resume", preexec_fn=small_files, restore_signals=False)
        self.assertEqual(failed.returncode, 3, failed.stderr)
        self.assertRegex(failed.stderr, r"(?m)^parlat: error: .*step-000010.*\n$")
        self.assertEqual({path: path.read_bytes() for path in (full / "checkpoints/step-000005").iterdir()}, before)
        self.succeed(full, "--steps", "10", "--resume")
        self.assertEqual([r["loss"] for r in self.records(full) if "loss" in r][5:],
                         [r["loss"] for r in self.records(whole) if "loss" in r][5:])

    def test_config_file_and_record(self):
        out, record = self.folder / "run", self.folder / "record.json"
        config = self.folder / "run.toml"
        config.write_text('[train]\nsteps = 3\neval-every = 1\nform = "absorbed"\nkernel = "eager"\n')
        arguments = self.command(out, "--config", str(config), "--json", str(record))
        for flag in ("--steps", "--eval-every"):
            at = arguments.index(flag)
            del arguments[at:at + 2]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["step"] for r in self.records(out)], [1, 1, 2, 2, 3, 3])
        written = json.loads(record.read_text())
        self.assertEqual(written["command"], "train")
        row = written["rows"][0]
        self.assertEqual((row["form"], row["ranks"], row["steps"]), ("absorbed", 2, 3))
        self.assertEqual((row["kernel"], row["save"], row["ring_groups"]), ("eager", "latent", 0))
        self.assertEqual(row["sent_bytes"]["total"],
                         sum(value for kind, value in row["sent_bytes"].items() if kind != "total"))
        self.assertIn("absorbed", done.stdout)
        self.assertIn(str(out / "metrics.jsonl"), done.stdout)

    def test_errors_of_a_config_file_name_file_and_key(self):
        config = self.folder / "run.toml"
        for expected, text in (
                ("train.stpes: expected a subcommand's flag under [its name], got no such one", "[train]\nstpes = 3\n"),
                ("trian: expected a subcommand's flag", "[trian]\nsteps = 3\n"),
                ("eval.steps: expected a subcommand's flag", "[eval]\nsteps = 3\n"),
                ("keep: expected a subcommand's flag", "keep = 3\n"),
                ("train.config: expected a subcommand's flag", '[train]\nconfig = "other.toml"\n'),
                ('{"keep": 3}: expected a subcommand\'s flag', '{"keep": 3}\n'),
                ("train.keep 3: expected a subcommand's flag", "[train]\nkeep 3\n"),
                ("train.keep: expected an integer, got", '[train]\nkeep = "many"\n'),
                ("train.keep: expected an integer, got", "[train]\nkeep =\n"),
                ("train.keep: expected one value, got 1, 2", "[train]\nkeep = [1, 2]\n"),
                ("train.keep: expected a value, got none", "[train]\nkeep = []\n"),
                ("train.keep: expected at least 1, got 0", "[train]\nkeep = 0\n"),
                ("train.threads: ", "[train]\nthreads = 0\n"),
                ("train.clip: expected a finite number, got 'nan'", "[train]\nclip = nan\n"),
                ("train.timeout: expected 0.001 to 1e9 seconds, got 0", "[train]\ntimeout = 0\n"),
                ("train.resume: expected true or false, got maybe", '[train]\nresume = "maybe"\n'),
                ("train.form: expected one of explicit, absorbed, laga", '[train]\nform = "cube"\n')):
            with self.subTest(text=text):
                config.write_text(text)
                failed = self.run_train(self.folder / "run", "--config", str(config))
                self.assertEqual(failed.returncode, 2)
                self.assertRegex(failed.stderr, r"^parlat: error: .*\n$")
                self.assertIn(f"{config}: {expected}", failed.stderr)
        # The command line wins, and what is wrong with it is not the file's.
        failed = self.run_train(self.folder / "run", "--config", str(config), "--form", "ball")
        self.assertTrue(failed.stderr.startswith("parlat: error: form: expected one of"), failed.stderr)

    def test_damaged_checkpoints(self):
        whole, damaged = self.folder / "whole", self.folder / "damaged"
        self.succeed(whole, "--steps", "10", "--seed", "2")
        self.succeed(damaged, "--steps", "10")
        weights, other = ("checkpoints/step-000010/model.safetensors", "checkpoints/step-000005/model.safetensors")
        shutil.copy(whole / weights, damaged / weights)
        passed_over = self.run_train(damaged, "--steps", "11", "--resume")
        self.assertEqual(passed_over.returncode, 0)
        self.assertIn(f"{damaged / weights}: expected ", passed_over.stderr)
        self.assertEqual(self.checkpoints(damaged), ["step-000005", "step-000010", "step-000011"])

        for checkpoint in self.checkpoints(damaged):
            shutil.copy(damaged / other, damaged / "checkpoints" / checkpoint / "config.json")
        failed = self.run_train(damaged, "--steps", "12", "--resume")
        self.assertEqual(failed.returncode, 3)
        self.assertRegex(failed.stderr, r'^parlat: error: .*/step-000011/config.json: expected {"bytes":.*, got {.*\n$')

    def test_checkpoints_carry_their_tokenizer(self):
        text = self.text.read_text()
        folder, pairs, bytes_out = (self.folder / name for name in ("tokenizer", "pairs", "bytes"))
        folder.mkdir()
        shutil.copy(TOKENIZER, folder)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        config = self.folder / "larger.json"
        config.write_text(json.dumps(MODEL | {"vocab_size": 1100}))
        few = ("--model-config", str(config), "--steps", "1")

        failed = self.run_train(pairs, "--tokenizer", str(folder))
        self.assertEqual((failed.returncode, failed.stdout), (2, ""))
        self.assertIn("expected a vocabulary of at least the 1005 tokens", failed.stderr)

        self.succeed(pairs, *few, "--tokenizer", str(folder))
        checkpoint = pairs / "checkpoints/step-000001"
        for file in folder.iterdir():
            self.assertEqual((checkpoint / file.name).read_bytes(), file.read_bytes())
        # What goes on from a checkpoint takes its tokenizer.
        self.succeed(self.folder / "again", "--init", str(checkpoint), *few)
        again = self.folder / "again/checkpoints/step-000001"
        self.assertEqual((again / "tokenizer.json").read_bytes(), (folder / "tokenizer.json").read_bytes())

        self.succeed(bytes_out, *few)
        tokenizer = transformers.AutoTokenizer.from_pretrained(bytes_out / "checkpoints/step-000001")
        self.assertEqual(tokenizer(text)["input_ids"], list(text.encode()))
        self.assertEqual((tokenizer.eos_token_id, len(tokenizer)), (256, 257))
        self.assertEqual(tokenizer.decode(list(text.encode())), text)

    def test_dry_run(self):
        record = self.folder / "record.json"
        command = [str(PROGRAM), "train", "--dry-run", "--model-config", "v3", "--ranks", "local:4", "--dtype", "bf16",
                   "--expert-parallel", "4", "--sequence", "1024", "--batch", "1", "--json", str(record), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("optimizer state", done.stdout)
        row = json.loads(record.read_text())["rows"][0]
        self.assertTrue(row["dry_run"])
        self.assertGreater(row["peak_bytes"], 671e9 * 16 / 4)  # of experts a rank has a quarter, and their whole state
        self.assertEqual(sum(row["peak_sites"].values()), row["peak_bytes"])
        refused = subprocess.run([str(PROGRAM), "train", "--dry-run", "--ranks", "mpi"], capture_output=True, text=True)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("dry-run: expected --ranks local:N", refused.stderr)

    def test_bad_requests_are_one_line(self):
        out = self.folder / "run"
        (self.folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
        (self.folder / "empty.txt").write_bytes(b"")
        for code, expected, arguments in (
                (2, "--no-such-flag", ["--no-such-flag"]),
                (2, "ranks: expected", ["--ranks", "local:0"]),
                (2, "form: expected one of", ["--form", "ring-of-fire"]),
                (2, "heads", ["--ranks", "local:5", "--expert-parallel", "1"]),
                (2, "expert", ["--expert-parallel", "3"]),
                (2, "data-parallel: expected at least 1, got 0", ["--data-parallel", "0"]),
                (2, "fp16", ["--dtype", "fp16"]),
                (2, "lr: expected a finite number, got 'nan'", ["--lr", "nan"]),
                (2, "lr: expected a finite number, got ''", ["--lr", ""]),
                (2, "lr: expected a number of at least 0, got -1", ["--lr", "-1"]),
                (2, "min-lr: ", ["--min-lr", "-1"]),
                (2, "beta1: expected at least 0 and less than 1, got 1", ["--beta1", "1"]),
                (2, "beta2: ", ["--beta2", "inf"]),
                (2, "weight-decay: ", ["--weight-decay", "nan"]),
                (2, "clip: ", ["--clip", "-1"]),
                (2, "eval-fraction: ", ["--eval-fraction", "nan"]),
                (2, "inner-norm-eps: ", ["--inner-norm-eps", "nan"]),
                *((2, f"timeout: expected a finite number, got '{bad}'", ["--timeout", bad])
                  for bad in ("nan", "inf", "")),
                *((2, f"timeout: expected 0.001 to 1e9 seconds, got {bad}", ["--timeout", bad])
                  for bad in ("0", "-1", "1e+30")),
                *((2, f"seed: expected an integer from 0 to {2**64 - 1}, got '{bad}'", ["--seed", bad])
                  for bad in ("-1", str(2**64))),
                (2, f"steps: expected an integer from {-2**63} to {2**63 - 1}, got '{2**63}'", ["--steps", str(2**63)]),
                (2, "train: expected nothing but the flags of --help, got 'now'", ["now"]),
                (3, "no-such.toml", ["--config", str(self.folder / "no-such.toml")]),
                (3, "text.txt: cannot be created: Not a directory", ["--out", str(self.text)]),
                (3, "no-such-folder/x.json: cannot be written", ["--json", str(self.folder / "no-such-folder/x.json")]),
                (3, "no-such-file", ["--data", str(self.folder / "no-such-file")]),
                (3, "latin.txt", ["--data", str(self.folder / "latin.txt")]),
                (3, "empty.txt", ["--data", str(self.folder / "empty.txt")]),
                (3, "expected at least", ["--sequence", "100000"]),
                (3, "data: expected at least one step's sequences (batch 100000 x accumulate 1), got",
                 ["--batch", "100000"])):
            with self.subTest(arguments=arguments):
                failed = self.run_train(out, *arguments)
                self.assertEqual(failed.returncode, code, failed.stderr)
                self.assertRegex(failed.stderr, r"^parlat: error: .*\n$")
                self.assertIn(expected, failed.stderr)
        self.assertFalse((out / "checkpoints").exists())

    def test_unknown_commands_are_named(self):
        for command, arguments in (("parlat: expected one of train, inspect, ", ["frain"]), ("got none", []),
                                   ("bench: expected one of attention, comm, decode, kernel, nondeterminism, got 'foo'", ["bench", "foo"]),
                                   ("comm: expected nothing but the flags", ["bench", "comm", "all_gather"])):
            failed = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual(failed.returncode, 2)
            self.assertRegex(failed.stderr, r"^parlat: error: .*\n$")
            self.assertIn(command, failed.stderr)

    def test_results_that_cannot_be_printed(self):
        with open("/dev/full", "w") as full:
            failed = subprocess.run(self.command(self.folder / "run", "--steps", "1"), stdout=full,
                                    stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(failed.returncode, 3)
        self.assertRegex(failed.stderr, r"^parlat: error: stdout: cannot be written: .*\n$")

    def test_one_writer_a_folder(self):
        out = self.folder / "run"
        first = subprocess.Popen(self.command(out, "--steps", "100000"), stdout=subprocess.DEVNULL)
        self.wait_for_step(first, out, 1)
        second = self.run_train(out, "--resume")
        first.kill()
        first.wait()
        self.assertEqual(second.returncode, 2)
        self.assertIn("expected a folder that no other run writes to", second.stderr)

    def test_inner_norm_eps(self):
        losses = []
        for eps in ("1e-6", "0.5"):
            out = self.folder / eps
            self.succeed(out, "--steps", "1", "--inner-norm-eps", eps)
            losses.append(self.records(out)[0]["loss"])
        self.assertNotEqual(*losses)
        failed = self.run_train(self.folder / "0.5", "--steps", "2", "--resume")
        self.assertEqual(failed.returncode, 2)
        self.assertIn("inner_norm_eps: checkpoint 0.5, now 1e-06", failed.stderr)


if __name__ == "__main__":
    unittest.main()
