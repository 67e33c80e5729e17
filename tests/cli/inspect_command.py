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


if __name__ == "__main__":
    unittest.main()
