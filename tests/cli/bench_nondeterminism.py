"""parlat bench nondeterminism: what its record says, and what is refused. Usage: bench_nondeterminism.py PROGRAM"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)


def bench(*arguments):
    return subprocess.run([PROGRAM, "bench", "nondeterminism", "--quick", *map(str, arguments)], capture_output=True,
                          text=True, timeout=300, check=False)


class Nondeterminism(unittest.TestCase):
    def test_twins_part_in_drawn_orders_alone(self):
        out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "record.json")
        done = bench("--json", out, "--quiet")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("experts over dense", done.stdout)
        record = json.loads(out.read_text())
        self.assertTrue(record["config"]["ok"])
        rows = {(row["model"], row["order"]): row for row in record["rows"]}
        self.assertEqual(len(rows), 4)
        for (_, order), row in rows.items():
            self.assertEqual(len(row["steps"]), record["config"]["steps"])
            apart = [step[key] for step in row["steps"]
                     for key in ("loss_difference", "output_difference", "weight_difference", "flips")]
            self.assertEqual(any(apart), order == "drawn")

    def test_refuses_what_it_cannot_do(self):
        for error, arguments in ((r"model: expected one with experts, got youtu", ["--model-config", "youtu"]),
                                 (r"dtype: expected fp32 or fp64.*, got bf16", ["--dtype", "bf16"]),
                                 (r"model: expected two in training to fit in .*, got .* for v3",
                                  ["--model-config", "v3"])):
            failed = bench(*arguments)
            self.assertEqual(failed.returncode, 2)
            self.assertRegex(failed.stderr, rf"^parlat: error: {error}\n$")

    def test_a_run_that_diverges_fails_with_its_step_and_no_table(self):
        failed = bench("--lr", "1e30", "--quiet")
        self.assertEqual((failed.returncode, failed.stdout), (1, ""))
        self.assertRegex(failed.stderr, r"^parlat: error: step \d+: the dense twins diverged, .*\n$")


if __name__ == "__main__":
    unittest.main()
