"""scripts/reproduce: the papers' figures are whole, records are used again, pages set both side by side."""
import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"
sys.path.insert(0, str(SCRIPT.parent))
from reproduce_lib import laga, pages, records  # noqa: E402

# Counts its calls but for --version, and writes them where --json says.
PARLAT = """#!/usr/bin/env python3
import json, pathlib, sys
if "--version" in sys.argv:
    sys.exit(print("parlat 1 (c)"))
calls = pathlib.Path(__file__).with_name("calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if "fail" in sys.argv:
    sys.exit(3)
json.dump({"rows": [], "arguments": sys.argv[1:]}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""


class Reproduce(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        program = self.folder / "parlat"
        program.write_text(PARLAT)
        os.chmod(program, stat.S_IRWXU)
        for name, value in (("OUT", self.folder), ("PARLAT", program), ("program_version", lambda: "parlat 1 (c)")):
            self.enterContext(unittest.mock.patch.object(records, name, value))

    def test_paper_tables_are_whole(self):
        for tables in json.loads((SCRIPT.parent / "paper_tables.json").read_text()).values():
            self.assertIn("arXiv", tables.pop("source"))
            for name, table in tables.items():
                self.assertTrue(table["what"] and table["rows"], name)
                self.assertEqual({len(row) for row in table["rows"]}, {len(table["columns"])}, name)

    def test_a_record_is_measured_once_a_command(self):
        calls = self.folder / "calls"
        first = records.parlat("one", "inspect", "x")
        self.assertEqual(first["arguments"], ["inspect", "x", "--json", str(self.folder / "one.json")])
        self.assertEqual(records.parlat("one", "inspect", "x"), first)
        self.assertEqual(calls.read_text(), "x")
        records.parlat("one", "inspect", "y")
        self.assertEqual(calls.read_text(), "xx")

    def test_a_record_is_measured_anew_by_another_program_or_on_other_files(self):
        model, text, own = self.folder / "model", self.folder / "text", self.folder / "own"
        for folder in (model, own):
            folder.mkdir()

        def calls():
            records.parlat("one", "inspect", "--model", model, "--data", text, "--out", own, folder=own)
            own.mkdir(exist_ok=True)
            (own / "config.json").write_text(str(os.urandom(4)))
            return len((self.folder / "calls").read_text())

        for expected, file in ((1, text), (2, model / "config.json"), (3, model / "model.safetensors.index.json"),
                               (4, model / "model.safetensors")):
            file.write_text("new")
            self.assertEqual([calls(), calls()], [expected, expected], file)
        text.write_text("other")
        self.assertEqual([calls(), calls()], [5, 5])
        records.program_version = lambda: "parlat 1 (d)"
        self.assertEqual([calls(), calls()], [6, 6])

    def test_what_is_computed_is_never_used_again(self):
        for command in (["plan", "train"], ["bench", "attention", "--dry-run"]):
            for _ in range(2):
                records.parlat("one", *command)
        self.assertEqual((self.folder / "calls").read_text(), "xxxx")

    def test_equal_tensors_come_by_name(self):
        cell = {"peak_sites": {name: 1e6 for name in "cab"}, "ranks": 8, "sequence": 16384}
        rows = [cell | {"form": form} for form in laga.FORMS]
        lines = laga.sites({("eager", published): rows for published in (True, False)}, "eager").splitlines()
        self.assertEqual([line.split()[1] for line in lines[2:]], ["a", "b", "c"])

    def test_crossovers_say_on_which_side_a_form_is_faster(self):
        tokens, link = ("above", "below"), ("below", "above")
        for beyond, sides, unit, expected in ((True, tokens, 1, "above 2,000 x"), (False, tokens, 1, "below 2,000 x"),
                                              (True, link, 1e3, "below 2.0 x"), (False, link, 1e3, "above 2.0 x")):
            self.assertEqual(laga.turn({"at": 2000.0, "wins_beyond": beyond}, sides, unit, "x"), expected)
        self.assertEqual(laga.turn(None, tokens, 1, "x"), "-")

    def test_refusals_are_one_line_before_any_work(self):
        for exit_code, words, arguments in (
                (2, "expected tpla, which alone uses them, got laga", ["laga", "--model", "x"]),
                (2, "invalid choice: 'x'", ["x"]),
                (3, "--model: expected /nonexist/config.json", ["tpla", "--model", "/nonexist", "--data", "/nonexist"]),
                (3, "--data: expected /nonexist", ["tpla", "--data", "/nonexist"])):
            done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout), (exit_code, ""))
            self.assertRegex(done.stderr, rf"^reproduce: .*{words}.*\n$")

    def test_a_failed_command_leaves_no_record_behind(self):
        records.parlat("one", "inspect", "x")
        said = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
            records.parlat("one", "inspect", "fail")
        self.assertRegex(said.getvalue(), "exit 3 of .* fail")
        records.parlat("one", "inspect", "x")
        self.assertEqual((self.folder / "calls").read_text(), "xxx")

    def test_rows_are_found_and_set(self):
        rows = [{"form": "laga", "ranks": 2}, {"form": "laga", "ranks": 4}, {"form": "ring", "ranks": 4}]
        self.assertIs(records.find(rows, form="laga", ranks=4), rows[1])
        self.assertIsNone(records.find(rows, form="explicit"))
        with self.assertRaises(SystemExit):
            records.find(rows, form="laga")
        self.assertEqual(pages.markdown(["a", "b"], [[1, 2]]), "| a | b |\n| --- | --- |\n| 1 | 2 |")
        self.assertEqual([pages.number(value) for value in (None, 1234.567, 0, 0.0012)],
                         ["-", "1,234.57", "0.00", "1.2e-03"])


if __name__ == "__main__":
    unittest.main()
