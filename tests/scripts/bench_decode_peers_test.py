"""scripts/bench_decode_peers with programs that only say how long they took: the turns, the figures, the refusals."""
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Writes its calls and takes 2 ms at 1k tokens, 8 ms at 16k; with 2 threads half of that.
PARLAT = """
import json, sys
argument = lambda name: sys.argv[sys.argv.index(name) + 1]
threads = int(argument("--threads"))
open("calls", "a").write(f"parlat {threads}\\n")
contexts = map(int, argument("--context").split(","))
rows = [{"context": c, "ms": {"median": (2 if c < 16384 else 8) / threads, "min": 1}} for c in contexts]
json.dump({"version": "1", "commit": "c", "machine": {"isa": "AVX2"}, "rows": rows}, open(argument("--json"), "w"))
"""
# Its median is 4 ms, of ik_llama.cpp 3 ms with bf16 weights; the first and the last step are outliers.
PEER = """
import json, sys
from pathlib import Path
model, threads, cache, contexts, steps = sys.argv[1:]
name = Path(sys.argv[0]).resolve().parent.name
open("calls", "a").write(f"{name} {Path(model).name} {cache} {threads}\\n")
print("====== said by the library")
ms = 3 if name == "ik_llama.cpp" and "bf16" in model else 4
for context in contexts.split(","):
    print(json.dumps({"context": int(context), "ms": [ms / 2] + [ms] * (int(steps) - 2) + [10 * ms]}))
"""


class BenchDecodePeers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name).resolve()
        (self.tree / "scripts").mkdir()
        shutil.copy(SCRIPTS / "bench_decode_peers", self.tree / "scripts")
        config = self.tree / "examples" / "v2-lite-attention" / "config.json"
        config.parent.mkdir(parents=True)
        config.write_text("{}")
        self.program("build/release/parlat", PARLAT)
        for name, suffix in (("llama.cpp", ""), ("ik_llama.cpp", "-query-latent")):
            self.program(f"out/peers/decode/{name}/decode_peer", PEER)
            for weights in ("bf16", "f16"):
                (self.tree / "out" / "peers" / "decode" / f"{weights}{suffix}.gguf").touch()

    def program(self, name, body):
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "scripts/bench_decode_peers", "--caches", "f16", *arguments],
                              cwd=self.tree, capture_output=True, text=True, timeout=60)

    def expect_refused(self, words, *arguments):
        result = self.run_script(*arguments)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn(words, result.stderr.splitlines()[-1])
        self.assertNotIn("Traceback", result.stderr)

    def test_engines_take_turns(self):
        result = self.run_script("--contexts", "1024", "--threads", "2", "--rounds", "2", "--weights", "bf16")
        self.assertEqual(result.returncode, 0, result.stderr)
        llama, ik = "llama.cpp bf16.gguf f16 2", "ik_llama.cpp bf16-query-latent.gguf f16 2"
        self.assertEqual((self.tree / "calls").read_text().splitlines(), ["parlat 2", llama, ik, llama, ik, "parlat 2"])

    def test_figures(self):
        result = self.run_script("--quick", "--contexts", "1024,16384")
        self.assertEqual(result.returncode, 0, result.stderr)
        record = json.loads((self.tree / "out" / "bench_decode_peers.json").read_text())
        self.assertEqual(len(record["rows"]), (1 + 2 * 2) * 2 * 2)  # engines with two weights, threads, contexts
        rate = {(row["engine"], row["weights"], row["threads"], row["context"]): row["tokens_per_s"]
                for row in record["rows"]}
        self.assertEqual(rate["parlat", "bf16", 2, 16384], {"min": 250, "median": 250, "max": 250})
        self.assertEqual(rate["llama.cpp", "f16", 1, 1024]["median"], 250)  # of 4 ms: outliers do not count
        self.assertEqual({row["fastest_step"] for row in record["rows"] if row["engine"] == "llama.cpp"}, {500})
        ratio = {(row["peer"], row["threads"], row["context"]): (row["weights"], row["ratio"])
                 for row in record["ratios"]}
        self.assertEqual(len(ratio), 8)
        self.assertEqual(ratio["ik_llama.cpp", 1, 1024][0], "bf16")  # the faster of its two
        self.assertAlmostEqual(ratio["ik_llama.cpp", 1, 1024][1], 1.5)
        self.assertAlmostEqual(ratio["ik_llama.cpp", 1, 16384][1], 3 / 8)
        self.assertAlmostEqual(ratio["llama.cpp", 2, 16384][1], 1)
        table = [line.split() for line in result.stdout.splitlines()]
        self.assertIn("parlat, bf16/bf16, 1 thread 500.0 (500.0-500.0) 125.0 (125.0-125.0)".split(), table)
        self.assertIn(["parlat", "/", "ik_llama.cpp", "1.50", "0.38"], table)
        self.assertEqual(record["config"]["packages"].keys(), {"llama.cpp", "ik_llama.cpp"})
        self.assertEqual(record["commit"], "c")

    def test_refusals_are_one_line(self):
        self.expect_refused("expected some of llama.cpp, ik_llama.cpp, got 'vllm'", "--peers", "vllm")
        self.expect_refused("expected a config.json at nowhere", "--model-config", "nowhere")
        self.program("out/peers/decode/llama.cpp/decode_peer", "import sys; sys.exit('error: cannot be loaded')")
        self.expect_refused("llama.cpp failed (1): error: cannot be loaded", "--quick")
        os.remove(self.tree / "build" / "release" / "parlat")
        self.expect_refused("expected build/release/parlat; run ./scripts/build")


if __name__ == "__main__":
    unittest.main()
