"""scripts/reproduce: the papers' figures are whole, records are used again, pages set both side by side."""
import importlib.machinery
import importlib.util
import json
import os
import stat
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"
# Counts its calls, and writes them where --json says.
PARLAT = """#!/usr/bin/env python3
import json, pathlib, sys
calls = pathlib.Path(__file__).with_name("calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if "fail" in sys.argv:
    sys.exit(3)
json.dump({"rows": [], "arguments": sys.argv[1:]}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""


def load():
    loader = importlib.machinery.SourceFileLoader("reproduce", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("reproduce", loader))
    loader.exec_module(module)
    return module


class Reproduce(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.reproduce = load()
        self.reproduce.OUT = self.folder
        self.reproduce.PARLAT = self.folder / "parlat"
        self.reproduce.PARLAT.write_text(PARLAT)
        os.chmod(self.reproduce.PARLAT, stat.S_IRWXU)

    def test_paper_tables_are_whole(self):
        for tables in json.loads((SCRIPT.parent / "paper_tables.json").read_text()).values():
            self.assertIn("arXiv", tables.pop("source"))
            for name, table in tables.items():
                self.assertTrue(table["what"] and table["rows"], name)
                self.assertEqual({len(row) for row in table["rows"]}, {len(table["columns"])}, name)

    def test_a_record_is_measured_once_a_command(self):
        calls = self.folder / "calls"
        first = self.reproduce.parlat("one", "plan", "train")
        self.assertEqual(first["arguments"], ["plan", "train", "--json", str(self.folder / "one.json")])
        self.assertEqual(self.reproduce.parlat("one", "plan", "train"), first)
        self.assertEqual(calls.read_text(), "x")
        self.reproduce.parlat("one", "plan", "decode")
        self.assertEqual(calls.read_text(), "xx")

    def test_a_failed_command_leaves_no_record_behind(self):
        self.reproduce.parlat("one", "plan", "train")
        with self.assertRaisesRegex(SystemExit, "exit 3 of .* fail"):
            self.reproduce.parlat("one", "plan", "fail")
        self.reproduce.parlat("one", "plan", "train")
        self.assertEqual((self.folder / "calls").read_text(), "xxx")

    def test_rows_are_found_and_set(self):
        rows = [{"form": "laga", "ranks": 2}, {"form": "laga", "ranks": 4}, {"form": "ring", "ranks": 4}]
        self.assertIs(self.reproduce.find(rows, form="laga", ranks=4), rows[1])
        self.assertIsNone(self.reproduce.find(rows, form="explicit"))
        with self.assertRaises(SystemExit):
            self.reproduce.find(rows, form="laga")
        self.assertEqual(self.reproduce.markdown(["a", "b"], [[1, 2]]), "| a | b |\n| --- | --- |\n| 1 | 2 |")
        self.assertEqual([self.reproduce.number(value) for value in (None, 1234.567, 0, 0.0012)],
                         ["-", "1,234.57", "0.00", "1.2e-03"])


if __name__ == "__main__":
    unittest.main()
