"""What cannot be is refused before anything is printed: lists, documents, dtypes, dry runs, PARLAT_ISA; and what a record
says of a forced one. Usage: refusals.py PROGRAM"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
ATTENTION = ("bench", "attention", "--heads", 2, "--d-model", 64, "--sequence", 16)
MPIRUN = ("mpirun", *(("--allow-run-as-root",) if os.geteuid() == 0 else ()), "--oversubscribe", "-n", "2")


def run(*arguments, launcher=(), **environment):
    return subprocess.run([*launcher, PROGRAM, *map(str, arguments)], env=os.environ | environment, capture_output=True,
                          text=True, timeout=120, check=False)


class Refusals(unittest.TestCase):
    def expect_refused(self, message, *arguments, **environment):
        done = run(*arguments, **environment)
        self.assertEqual((done.returncode, done.stdout), (2, ""), arguments)
        self.assertIn(message, done.stderr)
        self.assertTrue(done.stderr.startswith("parlat: error: ") and done.stderr.count("\n") == 1, done.stderr)

    def test_lists_with_empty_elements(self):
        machine = ("--machine", "h800x8-roce")
        for flag, text, arguments in (("sequence", "4096,,8192", ("plan", "train", *machine)),
                                      ("sequence", "4096,", ("plan", "train", *machine)),
                                      ("context", ",4096", ("plan", "decode", *machine)),
                                      ("forms", "laga,,ring", ATTENTION),
                                      ("dtype", "fp32,", ATTENTION),
                                      ("bytes", "1,,2", ("bench", "comm")),
                                      ("layouts", "mla,", ("bench", "decode"))):
            said = f"{flag}: expected values with one comma between them, got '{text}'"
            self.expect_refused(said, *arguments, f"--{flag}", text)
            self.expect_refused(said, *arguments, f"--{flag}={text}")
        self.expect_refused("ranks: expected values with one comma", *ATTENTION, "--ranks", "local:2,,4")
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
            config.write('[plan.train]\nmachine = "h800x8-roce"\nsequence = "4096,,8192"\n')
            config.flush()
            self.expect_refused(f"{config.name}: plan.train.sequence: expected values with one comma between them, "
                                "got '4096,,8192'", "--config", config.name, "plan", "train")

    def test_more_documents_than_tokens(self):
        said = "documents: expected at most the 16 tokens of a sequence, got 17"
        self.expect_refused(said, *ATTENTION, "--documents", 17)
        self.expect_refused(said, *ATTENTION, "--documents", 17, "--dry-run")
        self.expect_refused(said, "verify", "--quick", "--sequence", 16, "--documents", 17)

    def test_dtypes(self):
        self.expect_refused("dtype: expected fp32, bf16 or fp64, got 'fp8'", *ATTENTION, "--dtype", "fp8")
        self.expect_refused("cache-dtype: expected fp32 or bf16, got 'fp8'", "bench", "decode", "--cache-dtype", "fp8")
        self.expect_refused("dtype: expected fp32 or bf16, got 'fp8'", "train", "--dry-run", "--dtype", "fp8")

    def test_every_process_of_its_own_speaks(self):
        """Launchers number processes that are not ranks of one run; of one run's ranks the first speaks."""
        said = "dtype: expected fp32, bf16 or fp64, got 'fp8'"
        for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
            self.expect_refused(said, *ATTENTION, "--dtype", "fp8", **{variable: "1"})
            self.assertEqual(run(*ATTENTION, "--dtype", "fp8", "--ranks", "mpi", **{variable: "1"}).stderr, "")
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
            config.write('[bench.attention]\nranks = "mpi"\ndtype = "fp8"\n')
            config.flush()
            self.assertEqual(run("--config", config.name, "bench", "attention", PMI_RANK="1").stderr, "")
        done = run(*ATTENTION, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
        self.assertIn("mpirun started 2 processes", done.stderr)
        self.assertEqual(done.stderr.count("mpirun started"), 1)

    def test_published_forms(self):
        self.expect_refused("as-published: expected the forms explicit, absorbed or laga, got ring", *ATTENTION,
                            "--as-published", "--forms", "ring")
        self.expect_refused("ranks", *ATTENTION, "--as-published", "--ranks", "local:3")  # of 2 heads

    def test_dry_runs_of_several_processes(self):
        said = "dry-run: expected --ranks local:N, threads that exchange shapes, got mpi"
        for arguments in ((*ATTENTION, "--dry-run"), (*ATTENTION, "--as-published"), ("train", "--dry-run")):
            self.expect_refused(said, *arguments, "--ranks", "mpi")
            if shutil.which("mpirun"):
                done = run(*arguments, "--ranks", "mpi", launcher=MPIRUN)
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("parlat")), (2, "", 1), done.stderr)
                self.assertIn(said, done.stderr)

    def test_dry_runs_of_too_many_tokens(self):
        self.expect_refused("sequence: expected the positions of all tokens to fit in ", "train", "--dry-run",
                            "--sequence", 99999999999999)

    def test_unknown_instruction_set(self):
        for arguments in (ATTENTION, ("bench", "kernel", "--sequence", 16, "--heads", 2),
                          ("bench", "decode", "--layers", 1, "--context", 16), ("verify", "--quick"),
                          ("bench", "nondeterminism", "--quick"), ("train", "--dry-run")):
            self.expect_refused("PARLAT_ISA: expected one of ", *arguments, PARLAT_ISA="mmx")

    def test_kernels_beyond_memory(self):
        kernel = ("bench", "kernel", "--heads", 2, "--sequence", "16,1073741824")
        self.expect_refused("kernel fused: expected 2 heads of 1073741824 tokens to fit in ", *kernel)
        self.expect_refused("kernel torch: expected 64 heads of 500000 tokens to fit in ", "bench", "kernel", "--heads", 64,
                            "--sequence", "500000", "--kernels", "torch")

    def test_weights_beyond_memory(self):
        beyond = "weights: expected at most this machine's memory of "
        self.expect_refused(beyond, "bench", "decode", "--model-config", "v3", "--context", 16)
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("word " * 10000)
            self.expect_refused(beyond, "train", "--model-config", "v3", "--data", text, "--out", f"{folder}/out")

    def test_record_of_a_forced_instruction_set(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "record.json")
            for forced in ("", "portable"):
                done = run(*ATTENTION, "--forms", "laga", "--repeats", 1, "--quiet", "--json", out, PARLAT_ISA=forced)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertEqual(json.loads(out.read_text())["machine"].get("forced_isa", ""), forced)


if __name__ == "__main__":
    unittest.main()
