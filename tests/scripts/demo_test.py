"""scripts/demo from beginning to end, with the real program and a smaller number behind every flag that costs time."""
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARLAT = ROOT / "build" / "release" / "parlat"
# Runs the program with these in place of the demo's.
SMALLER = f"""#!{sys.executable}
import os, sys
smaller = {{"--steps": "30", "--sequence": "64", "--calibration-tokens": "512", "--fit-steps": "1", "--tokens": "120",
           "--context": "64,80", "--batch": "2", "--new-tokens": "5"}}
arguments = [smaller.get(before, now) for before, now in zip(sys.argv, sys.argv[1:])]
os.execv("{PARLAT}", ["{PARLAT}", *arguments])
"""


@unittest.skipUnless(PARLAT.exists(), "build/release/parlat is not built")
class Demo(unittest.TestCase):
    def setUp(self):
        self.tree = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        (self.tree / "scripts").mkdir()
        for name in ("demo", "environment.sh", "requirements.txt"):
            shutil.copy(ROOT / "scripts" / name, self.tree / "scripts")
        (self.tree / ".venv").symlink_to(sys.prefix)
        self.program("build/release/parlat", SMALLER)
        self.program("bin/cmake", "#!/bin/sh\n")  # nothing to build

    def program(self, name, body):
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def demo(self, *arguments):
        environment = os.environ | {"PATH": f"{self.tree}/bin:{os.environ['PATH']}"}
        return subprocess.run([self.tree / "scripts/demo", *arguments], cwd=self.tree, env=environment,
                              capture_output=True, text=True, timeout=300)

    def test_runs_to_its_end(self):
        # Learned within the few steps, so that the demo's own verdict on the trained model is put to the test; of more
        # different bytes than half a latent has columns, so that the first layer's vary in both slices.
        text = self.tree / "text.txt"
        text.write_text("The quick brown fox jumps over 1,234,567,890 lazy dogs; SPHINX OF BLACK QUARTZ, JUDGE MY VOW!\n" * 200)
        done = self.demo("--data", "text.txt")
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        out = self.tree / "out/demo"
        rows = {name: json.loads((out / f"{name}.json").read_text())["rows"] for name in ("train", "attention", "eval")}
        self.assertEqual([row["layout"] for row in rows["eval"]], ["mla", "gla", "dcp", "tpla"])
        self.assertLessEqual({"explicit", "absorbed", "laga", "ring"}, {row["form"] for row in rows["attention"]})
        for transform in ("hadamard", "pca", "balanced"):
            self.assertTrue((out / transform / "slices-2.safetensors").exists(), transform)
        written = re.findall(r"^== the model writes, layout (\w+)\n(?=.)", done.stdout, re.MULTILINE)
        self.assertEqual(written, ["mla", "tpla"])

    def test_refusals_are_one_line(self):
        for words, arguments in [("unknown argument --dat", ["--dat"]), ("--data needs files", ["--data"]),
                                 ("--data: expected files that are there, got nowhere.txt", ["--data", "nowhere.txt"])]:
            done = self.demo(*arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, f"^demo: error: {words}.*\n$")


if __name__ == "__main__":
    unittest.main()
