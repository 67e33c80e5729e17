"""scripts/check_layers accepts a good tree and names every kind of fault in a bad one."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_layers"

GOOD = {
    "parlat/CMakeLists.txt": """
        parlat_library(base)
        parlat_library(config DEPS base)
        parlat_library(tensor TORCH DEPS base LINKS x::y)
        parlat_library(train TORCH DEPS base tensor
                       PRIVATE_LINKS z)
        parlat_library(decode TORCH DEPS base tensor)
    """,
    "parlat/base/error.h": "#include <string>\nstruct Error {};\n",
    "parlat/base/log.cc": '#include <spdlog/spdlog.h>\n#include "parlat/base/error.h"\n',
    "parlat/config/model.h": '#include "parlat/base/error.h"\nstruct Model {};\n',
    "parlat/tensor/shape.h": '#include <ATen/ATen.h>\n#include "parlat/base/error.h"\nstruct Shape {};\n',
    "parlat/train/forms.h": "struct Registry {};\n",
    "parlat/train/forms.cc": '#include "parlat/train/forms.h"\n#include "parlat/train/laga.h"\n'
                             '#include "parlat/train/ring.h"\n',
    "parlat/train/laga.h": '#include "parlat/tensor/shape.h"\nstruct Laga {};\n',
    "parlat/train/laga.cc": '#include "parlat/train/laga.h"\n',
    "parlat/train/ring.h": "struct Ring {};\n",
    "cli/main.cc": '#include <CLI/CLI.hpp>\n#include "parlat/train/forms.h"\n',
    "tests/run_ranks.h": "struct Ranks {};\n",
    "tests/train/laga_test.cc": '#include "parlat/train/laga.h"\n',
}


def run(changes):
    """The exit code and output for the good tree with some files replaced."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (GOOD | changes).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr


class CheckLayers(unittest.TestCase):
    def refuses(self, file, text, *words):
        code, output = run({file: text})
        self.assertEqual(code, 1, output)
        self.assertEqual(len(output.splitlines()), 1, output)
        for word in words:
            self.assertIn(word, output)

    def test_good_tree_passes(self):
        code, output = run({})
        self.assertEqual((code, output), (0, "12 files keep to the layers of parlat/CMakeLists.txt\n"))

    def test_include_of_a_folder_above(self):
        self.refuses("parlat/config/model.h", '#include "parlat/tensor/shape.h"\nint i;\n', "parlat/config/model.h",
                     "config may include base")

    def test_include_outside_the_library(self):
        self.refuses("parlat/base/error.h", '#include "tests/run_ranks.h"\nint i;\n', "nothing outside parlat/")

    def test_tests_included_by_the_program(self):
        self.refuses("cli/main.cc", '#include "tests/run_ranks.h"\n', "only tests include tests")

    def test_torch_below_its_layer(self):
        self.refuses("parlat/config/model.h", "  # include <torch/library.h>\nint i;\n", "config does not see torch")

    def test_unknown_file(self):
        self.refuses("parlat/base/error.h", '#include "error.h"\nint i;\n', "no file of this tree")

    def test_generated_file(self):
        use = {"parlat/base/error.h": '#include "version.h"\nint i;\n'}
        self.assertEqual(run(use)[0], 1)
        self.assertEqual(run(use | {"cmake/version.cmake": ""})[0], 0)

    def test_confined_library(self):
        self.refuses("parlat/train/laga.cc", "#include <mpi.h>\n", "parlat/comm/mpi")

    def test_forms_that_include_each_other(self):
        self.refuses("parlat/train/laga.cc", '#include "parlat/train/ring.h"\n', "forms do not include each other")

    def test_umbrella_header(self):
        self.refuses("parlat/train/forms.h", '#pragma once\n// All.\n#include "parlat/tensor/shape.h"\n', "only includes")

    def test_headers_that_include_each_other(self):
        self.refuses("parlat/tensor/shape.h", '#include "parlat/tensor/shape.h"\nint i;\n', "include each other",
                     "shape.h -> parlat/tensor/shape.h")

    def test_folder_missing_in_the_table(self):
        self.refuses("parlat/extra/extra.h", "int i;\n", "parlat/extra/", "not listed")

    def test_table_out_of_order(self):
        table = GOOD["parlat/CMakeLists.txt"].replace("config DEPS base", "config DEPS base tensor")
        self.refuses("parlat/CMakeLists.txt", table, "config needs tensor")

    def test_train_and_decode_apart(self):
        table = GOOD["parlat/CMakeLists.txt"].replace("decode TORCH DEPS", "decode TORCH DEPS train")
        self.refuses("parlat/CMakeLists.txt", table, "decode may not need train")


if __name__ == "__main__":
    unittest.main()
