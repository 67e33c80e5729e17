"""parlat inspect: the record of a checkpoint, and its exit codes. Usage: inspect_command.py PROGRAM"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures" / "v3_half_split_large_eps"


def inspect(*arguments):
    return subprocess.run([PROGRAM, "inspect", *map(str, arguments)], capture_output=True, text=True, check=False)


class Inspect(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_record_of_a_checkpoint(self):
        out = self.folder / "record.json"
        done = inspect("--model", FIXTURE, "--dtype", "bf16", "--json", out)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("every tensor present and of its shape", done.stdout)
        record = json.loads(out.read_text())
        config = json.loads((FIXTURE / "config.json").read_text())
        resolved = record["config"]["resolved"]
        for key in ("hidden_size", "kv_lora_rank", "rms_norm_eps", "rope_interleave"):
            self.assertEqual(resolved[key], config[key], key)
        self.assertEqual(resolved["inner_norm_eps"], 1e-6)
        self.assertEqual(sum(row["bytes"] for row in record["rows"]), record["config"]["weight_bytes_per_rank"])

    def test_predicts_the_cache_of_every_layout(self):
        out = self.folder / "record.json"
        done = inspect("--model-config", "v3", "--json", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(out.read_text())["config"]["predicted_cache"]
        key = "cache_elements_per_token_and_layer"
        elements = {(row["layout"], row["groups"], row["ranks"]): row[key] for row in rows}
        # Slices on as many ranks as there are groups and more; whole latents on all four rank counts.
        self.assertEqual(len(rows), len(elements))
        self.assertEqual(len(rows), 2 * 4 + 3 * (3 + 2 + 1))
        for layout, want in {("mla", 1, 1): 576, ("mla", 1, 8): 576, ("gla", 2, 2): 320, ("tpla", 2, 2): 320,
                             ("tpla", 2, 8): 320, ("tpla", 4, 4): 192, ("tpla", 8, 8): 128, ("dcp", 1, 8): 72,
                             ("tpla-dcp", 2, 8): 80, ("tpla-dcp", 4, 8): 96}.items():
            self.assertEqual(elements[layout], want, layout)
        self.assertTrue(all(row["cache_bytes_per_token"] == row[key] * 61 * 2 for row in rows))
        self.assertRegex(done.stdout, r"cache a token and rank, predicted +groups +1 rank +2 ranks +4 ranks +8 ranks\n")
        self.assertRegex(done.stdout, r"tpla +2 +- +320: 39\.0 kB")

    def test_configuration_precedes_what_is_wrong_with_the_files(self):
        shutil.copytree(FIXTURE, self.folder / "model")
        weights = self.folder / "model" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1024])
        done = inspect("--model", self.folder / "model")
        self.assertEqual(done.returncode, 3)
        self.assertIn("softmax_scale", done.stdout)
        self.assertRegex(done.stderr, r"^parlat: error: .*model\.safetensors: .*cut short\)\n$")

    def test_what_cannot_be(self):
        self.assertEqual(inspect("--model-config", self.folder / "none").returncode, 3)
        (self.folder / "config.json").write_text('{"hidden_act": "gelu"}')
        done = inspect("--model-config", self.folder)
        self.assertEqual(done.returncode, 2)
        self.assertIn('hidden_act: expected silu, got "gelu"', done.stderr)
        self.assertEqual(inspect("--model-config", "tiny", "--expert-parallel", 9).returncode, 2)

    def test_inner_norm_eps(self):
        out = self.folder / "record.json"
        done = inspect("--model", FIXTURE, "--inner-norm-eps", "1e-5", "--json", out)
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"inner_norm_eps +1e-05")
        self.assertEqual(json.loads(out.read_text())["config"]["resolved"]["inner_norm_eps"], 1e-5)
        self.assertEqual(inspect("--model", FIXTURE, "--inner-norm-eps", "nan").returncode, 2)

    def test_names_from_files_do_not_reach_the_terminal(self):
        config = json.loads((FIXTURE / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps(config | {"harmless\x1b[2J\nkey": 1}))
        done = inspect("--model-config", self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("ignored keys: harmless\\x1b[2J\\x0akey\n", done.stdout)
        failed = inspect("--model-config", "a\x1b[2J\nb")
        self.assertRegex(failed.stderr, r"^parlat: error: a\\x1b\[2J\\x0ab: no such file.*\n$")

    def test_a_report_that_cannot_be_printed(self):
        with open("/dev/full", "w") as full:
            failed = subprocess.run([PROGRAM, "inspect"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(failed.returncode, 3)
        self.assertRegex(failed.stderr, r"^parlat: error: stdout: cannot be written: .*\n$")

    def test_the_record_goes_where_stdout_goes(self):
        done = inspect("--model-config", "tiny", "--json", "/dev/stdout")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout[done.stdout.index("\n{") :])["command"], "inspect")
        self.assertEqual(inspect("--model-config", "tiny", "--json", "/dev/null").returncode, 0)
        self.assertTrue(pathlib.Path("/dev/null").is_char_device())

    def test_records_replace_nothing_but_records(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "file"
            for _ in range(2):  # a record takes the place of an earlier one
                self.assertEqual(inspect("--model-config", "tiny", "--json", file).returncode, 0)
            file.write_text("a text given by mistake\n")
            failed = inspect("--model-config", "tiny", "--json", file)
            self.assertEqual((failed.returncode, failed.stdout), (3, ""))
            self.assertIn(f"{file}: expected a new file, or a record to replace, for --json", failed.stderr)
            self.assertEqual(file.read_text(), "a text given by mistake\n")
            with file.open("a") as appended:  # what stdout goes to is added to
                subprocess.run([PROGRAM, "inspect", "--model-config", "tiny", "--json", "/dev/stdout"], stdout=appended,
                               check=True)
            self.assertTrue(file.read_text().startswith("a text given by mistake\n"))


if __name__ == "__main__":
    unittest.main()
