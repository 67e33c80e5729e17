"""scripts/check_format accepts formatted sources, names what is not, and --fix puts right what can be."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class CheckFormat(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name)
        (self.tree / ".clang-format").write_text((ROOT / ".clang-format").read_text())
        (self.tree / "parlat").mkdir()

    def run_on(self, text, *options):
        (self.tree / "parlat/a.cc").write_text(text)
        result = subprocess.run([sys.executable, ROOT / "scripts/check_format", *options, self.tree],
                                capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    def test_formatted_source_passes(self):
        self.assertEqual(self.run_on("int f() { return 1; }\n"), (0, "1 files are formatted\n"))

    def test_other_form_is_named_and_fixed(self):
        code, output = self.run_on("int  f( ) {return 1;}\n")
        self.assertEqual(code, 1)
        self.assertIn("parlat/a.cc:1", output)
        self.assertEqual(self.run_on("int  f( ) {return 1;}\n", "--fix")[0], 0)
        self.assertEqual((self.tree / "parlat/a.cc").read_text(), "int f() { return 1; }\n")

    def test_long_file(self):
        self.assertEqual(self.run_on("int a();\n" * 400)[0], 0)
        self.assertEqual(self.run_on("int a();\n" * 401), (1, "parlat/a.cc: expected at most 400 lines, got 401\n"))

    def test_line_that_cannot_be_broken(self):
        self.assertEqual(self.run_on(f"// {'x' * 117}\n")[0], 0)
        self.assertEqual(self.run_on(f"// {'x' * 118}\n"),
                         (1, "parlat/a.cc:1: expected at most 120 characters, got 121\n"))


if __name__ == "__main__":
    unittest.main()
