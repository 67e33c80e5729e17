"""parlat plan: tables, records, exit codes, and that it loads no torch; and how parlat becomes parlat-torch, which has all
other commands. Usage: plan_command.py PROGRAM"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
TORCH_PROGRAM = PROGRAM + "-torch"
TRAIN = ("train", "--model-config", "v3", "--machine", "h800x8-roce.toml")


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


def plan(*arguments):
    return run(PROGRAM, "plan", *arguments)


def answer(done):
    return done.returncode, done.stdout, done.stderr


class Plan(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def record(self, *arguments):
        out = self.folder / "record.json"
        done = plan(*arguments, "--json", out)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout, json.loads(out.read_text())

    def test_train(self):
        text, record = self.record(*TRAIN, "--ranks", 16, "--nodes", 2, "--sequence", "4096,16384,131072")
        self.assertEqual(record["command"], "plan train")
        rows = record["rows"]
        self.assertTrue(all(row["predicted"] for row in rows))
        self.assertIn("predicted", text)
        for sequence in (4096, 16384, 131072):
            here = {row["split"]: row for row in rows if row["sequence"] == sequence}
            self.assertEqual(list(here), ["explicit", "absorbed", "laga", "laga-q", "ring", "hybrid 2x8", "hybrid 4x4",
                                          "hybrid 8x2"])
            used = [row for row in here.values() if row["use"]]
            self.assertEqual(len(used), 1)
            fastest = min(row["predicted_ms"]["total"] for row in here.values() if row["fits"])
            self.assertEqual(used[0]["predicted_ms"]["total"], fastest)
            self.assertRegex(text, rf"(?m)^{used[0]['split']} .* use this$")
        self.assertEqual(next(row for row in rows if row["split"] == "explicit")["paper_bytes"], 78643200)
        flops = {row["split"]: row["flops"] for row in rows if row["sequence"] == 4096}
        self.assertLess(flops["explicit"]["backward"], flops["laga"]["backward"])
        self.assertLess(flops["laga"]["forward"], flops["hybrid 2x8"]["forward"])
        self.assertRegex(text, r"4,096 tokens .* TFLOP +steps ")
        self.assertEqual({at["form"] for at in record["config"]["crossovers"]}, {"laga-q", "ring", "hybrid"})
        self.assertEqual(len(record["config"]["advice"]), 3)

    def test_decode(self):
        text, record = self.record("decode", "--model-config", "k2", "--layers", 8, "--ranks", 8, "--context", 32768,
                                   "--batch", "1,64", "--memory", "80GB", "--weights", "fp8",
                                   "--machine", "h800x8-roce")
        rows = {(row["layout"], row["groups"], row["batch"]): row for row in record["rows"]}
        sliced = {(layout, groups) for layout in ("gla", "tpla", "tpla-dcp") for groups in (2, 4, 8)}
        self.assertEqual({key[:2] for key in rows}, {("mla", 1), ("dcp", 1), ("gqa", 8)} | sliced)
        self.assertEqual(rows["tpla", 2, 64]["cache_bytes_per_token"], 320 * 8 * 2)
        largest = rows["mla", 1, 1]["largest_batch"]
        self.assertIn(("mla", 1, largest), rows)
        self.assertRegex(text, r"(?m)^tpla +2 +5\.1 kB")

    def test_decode_batches_that_do_not_fit(self):
        text, record = self.record("decode", "--machine", "h800x8-roce", "--model-config", "k2", "--layers", 8, "--ranks", 8,
                                   "--context", 4096, "--batch", "1,100000")
        too_many = [row for row in record["rows"] if row["batch"] == 100000]
        self.assertEqual(len(too_many), len({(row["layout"], row["groups"]) for row in record["rows"]}))
        for row in too_many:
            self.assertFalse(row["fits"])
            self.assertRegex(row["misfit"], r"^the batch takes .*B in .*B$")
            self.assertNotIn("predicted_tokens_per_s", row)
        self.assertEqual(text.count("the batch takes"), len(too_many))

    def test_answers_without_torch(self):
        """Loading torch's libraries is nearly all of what the other commands' answers take."""
        for program, loads in ((PROGRAM, False), (TORCH_PROGRAM, True)):
            self.assertEqual("libtorch" in run("ldd", program).stdout, loads)

    def test_both_programs_answer_alike(self):
        config, of_plans = self.folder / "run.toml", self.folder / "plans.toml"
        config.write_text('[plan.train]\nranks = 4\n[train]\nsteps = 3\n')
        of_plans.write_text('[plan.train]\nranks = 2\n[plan.decode]\nranks = 8\n')
        wrong = self.folder / "wrong.toml"
        wrong.write_text('[plan.train]\nrank = 2\n')
        machine = ("--machine", "h800x8-roce")
        for arguments in ((*TRAIN, "--ranks", 16, "--nodes", 2), ("decode", *machine, "--memory", "20GB"),
                          (*TRAIN, "--config", config), (*TRAIN, "--config", of_plans), (*TRAIN, f"--config={of_plans}"),
                          (*TRAIN, "--config", wrong), (*TRAIN, "--config"), ("train", "--help"),
                          ("decode", "--help"), ("--help",), ("train", "--version"), ("train",), (*TRAIN, "--nodes"), (*TRAIN, "extra"), (*TRAIN, "--no"),
                          ("train", "decode"), ("decode", *machine, "calibrate"), (*TRAIN, "--ranks", 9, "--nodes", 3),
                          (*TRAIN, "--config", self.folder / "none.toml"), ()):
            self.assertEqual(answer(plan(*arguments)), answer(run(TORCH_PROGRAM, "plan", *arguments)), arguments)
        self.assertIn(" 4 ranks ", plan(*TRAIN, "--config", config).stdout)
        self.assertIn(" 2 ranks ", plan(*TRAIN, "--config", of_plans).stdout)

    def test_other_commands_are_in_the_program_beside(self):
        for arguments in ((), ("--help",), ("--version",), ("plan", "calibrate"), ("train", "--nothing"), ("nothing",)):
            self.assertEqual(answer(run(PROGRAM, *arguments)), answer(run(TORCH_PROGRAM, *arguments)), arguments)
        alone = shutil.copy(PROGRAM, self.folder)
        config = self.folder / "plans.toml"
        config.write_text('[plan.train]\nranks = 4\n')
        self.assertIn(" 4 ranks ", run(alone, "plan", *TRAIN, "--config", config).stdout)
        missing = (f"parlat: error: {self.folder}/parlat-torch: expected the program of all commands but plan train and "
                   "plan decode, got: No such file or directory\n")
        self.assertEqual(answer(run(alone, "verify", "--quick")), (3, "", missing))
        link = self.folder / "linked"
        link.symlink_to(PROGRAM)
        self.assertEqual(run(link, "--version").returncode, 0)

    def test_what_cannot_be(self):
        broken = self.folder / "broken.toml"
        broken.write_text("ranks_per_node = 8\nspeed = 3\n")
        for arguments, code, message in (
                ((*TRAIN, "--ranks", 8, "--nodes", 3), 2, "nodes: expected a divisor of the 8 ranks, got 3"),
                ((*TRAIN, "--ranks", 0), 2, "--ranks"),
                ((*TRAIN, "--ranks", 8, "--sequence", "4096,0"), 2, "--sequence"),
                ((*TRAIN, "--ranks", 8, "--sequence", "-1"), 2, "--sequence"),
                ((*TRAIN, "--ranks", 16), 2, "ranks: expected at most 8 on each of 1 node of h800x8-roce, got 16"),
                ((*TRAIN, "--batch", 1 << 30, "--sequence", 1 << 40), 2, "sequence: expected sizes whose products"),
                ((*TRAIN, "--sequence", "abc"), 2, "--sequence: expected an integer, got 'abc'"),
                ((*TRAIN, "--sequence", "99999999999999999999"), 2, "--sequence: expected an integer from -9223372036"),
                ((*TRAIN, "--dtype", "fp8"), 2, "--dtype: expected bf16, fp32 or fp64, got 'fp8'"),
                ((*TRAIN, "--ranks", 8, "--ring-groups", -1), 2, "ring-groups that divide the 8 sequence ranks, or 0"),
                ((*TRAIN, "--ranks", 8, "--ring-groups", 3), 2, "ring-groups that divide the 8 sequence ranks, or 0"),
                ((*TRAIN, "--json", "/nonexist/x.json"), 3, "/nonexist/x.json: cannot be written"),
                (("decode", "--machine", "h800x8-roce", "--json", "/nonexist/x.json"), 3, "cannot be written"),
                ((*TRAIN, "--json", broken), 3, f"{broken}: expected a new file, or a record to replace, for --json"),
                (("train", "--machine", broken), 2, f"{broken}: memory_gb: expected a number above 0 and at most 1e18, got nothing"),
                (("train", "--machine", "nowhere"), 3, "machine: expected a file that can be read or one of "),
                (("train",), 2, "--machine"),
                (("decode", "--machine", "h800x8-roce", "--context", 0), 2, "--context"),
                *((("decode", "--machine", "h800x8-roce", "--memory", size), 2,
                   f"--memory: expected a whole number of bytes from 1 to 2^60, as in 80GB, got '{size}'")
                  for size in ("0", "-5GB", "-1", "5XB", "GB", "1.5GB", "2EB", "99999999999GB", "")),
                ((), 2, "plan: expected one of train, decode, calibrate, got none")):
            done = plan(*arguments)
            self.assertEqual((done.returncode, done.stdout), (code, ""), arguments)
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_many_ranks(self):
        _, record = self.record(*TRAIN, "--ranks", 100000, "--nodes", 12500, "--sequence", 10**7)
        runs = {row["split"]: row for row in record["rows"] if row["runs"]}
        self.assertIn("ring", runs)
        self.assertNotIn("laga", runs)
        for row in runs.values():
            self.assertGreater(row["predicted_ms"]["total"], 0)
            self.assertGreater(row["sent_bytes"]["total"], 0)

    def test_calibrate_describes_this_machine(self):
        out = self.folder / "machine.toml"
        done = plan("calibrate", "--out", out, "--quick", "--ranks", "local:2", "--dtype", "fp32", "--quiet")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, out.read_text())
        _, record = self.record("train", "--model-config", "v2-lite", "--machine", out, "--dtype", "fp32", "--ranks", 2,
                                "--sequence", 1024)
        for row in record["rows"]:
            if row["runs"]:
                self.assertTrue(1 < row["predicted_ms"]["total"] < 1e5, row)
        nowhere = plan("calibrate", "--out", self.folder / "no" / "where", "--quick", "--dtype", "fp32")
        self.assertEqual(nowhere.returncode, 3)

    def test_calibrate_looks_first_at_where_it_will_write(self):
        out = self.folder / "no" / "where"
        done = plan("calibrate", "--out", out, "--model-config", self.folder / "none.json")
        self.assertEqual(answer(done), (3, "", f"parlat: error: {out}: cannot be written: No such file or directory\n"))


if __name__ == "__main__":
    unittest.main()
