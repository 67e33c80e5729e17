"""What scripts/bench_peers, bench_training and bench_slicing cannot do is refused in one line before any work."""
import subprocess
import sys
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class BenchFlags(unittest.TestCase):
    def expect_refused(self, script, exit_code, flag, *values):
        for value in values:
            done = subprocess.run([sys.executable, SCRIPTS / script, f"{flag}={value}"], capture_output=True, text=True,
                                  timeout=60)
            self.assertEqual((done.returncode, done.stdout), (exit_code, ""), (script, flag, value, done.stderr))
            self.assertRegex(done.stderr, rf"^{script}: .*{flag}.*\n$")

    def test_peers(self):
        for flag, values in {"--links": ["fast", "1gbit,", "200", "none;1gbit"], "--ranks": ["0", "-1", "two", "2,,4"],
                             "--dtypes": ["fp16", "bf16,x"], "--forms": ["foo", "laga,"], "--heads": ["0", "x"],
                             "--sequence": ["0", "1k"], "--repeats": ["0", "2,3"], "--peers": ["vllm", "none,alst"],
                             "--sharding": ["x"], "--nothing": ["x"]}.items():
            self.expect_refused("bench_peers", 2, flag, *values)

    def test_training(self):
        for flag, values in {"--rounds": ["0", "-1", "x"], "--steps": ["1", "0"], "--threads": ["0"],
                             "--batch": ["0", "-2"], "--sequences": ["0", "1024,"], "--nothing": ["x"]}.items():
            self.expect_refused("bench_training", 2, flag, *values)
        self.expect_refused("bench_training", 3, "--model-configs", "nowhere", "examples/small,nowhere")
        self.expect_refused("bench_training", 3, "--json", f"{SCRIPTS}/bench_training/out/x.json", SCRIPTS)

    def test_slicing(self):
        for flag, values in {"--groups": ["0", "2,x"], "--sequence": ["0"], "--tokens": ["x"],
                             "--nothing": ["x"]}.items():
            self.expect_refused("bench_slicing", 2, flag, *values)


if __name__ == "__main__":
    unittest.main()
