"""scripts/environment.sh finds what is missing, installs it as root, says what to type otherwise, and mends .venv."""
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
INSTALLED = ("ninja-build", "openmpi-bin", "nlohmann-json3-dev", "libcli11-dev", "libfmt-dev", "libspdlog-dev",
             "libpcre2-dev", "libutf8proc-dev", "libxxhash-dev", "libhwy-dev", "libtomlplusplus-dev", "libdnnl-dev",
             "libgtest-dev", "libgmock-dev")


class Environment(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name).resolve()
        shutil.copytree(SCRIPTS, self.tree / "scripts")
        self.stub("dpkg-query", "printf '%s installed\\n' " + " ".join(INSTALLED) + "; exit 1")
        self.stub("apt-get", f'echo "$DEBIAN_FRONTEND $*" >> {self.tree}/apt.log')

    def stub(self, name, body):
        """Puts a command of that name before all others."""
        path = self.tree / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def bash(self, commands):
        environment = os.environ | {"PATH": f"{self.tree}/bin:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", f"source scripts/environment.sh; {commands}"], cwd=self.tree,
                              env=environment, capture_output=True, text=True)

    def test_lists_packages_when_not_root(self):
        self.stub("id", "echo 1000")
        result = self.bash("install_packages --test; echo went on")
        self.assertEqual(result.returncode, 1)
        self.assertIn("\nsudo apt-get install iproute2 libopenmpi-dev\n", result.stderr)
        self.assertNotIn("went on", result.stdout)
        self.assertFalse((self.tree / "apt.log").exists())

    def test_installs_packages_as_root(self):
        self.stub("id", "echo 0")
        result = self.bash("install_packages ''")
        self.assertEqual(result.returncode, 0, result.stderr)
        update, install = (self.tree / "apt.log").read_text().splitlines()
        self.assertEqual(update, "noninteractive update")
        self.assertTrue(install.startswith("noninteractive install --yes"), install)
        self.assertTrue(install.endswith(" libopenmpi-dev"), install)

    def test_failed_install_shows_why(self):
        self.stub("id", "echo 0")
        self.stub("apt-get", "echo no such package; exit 100")
        result = self.bash("install_packages ''; echo went on")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no such package", result.stderr)
        self.assertIn("could not install: libopenmpi-dev", result.stderr)

    def test_passes_over_a_python_that_does_not_run(self):
        self.stub("python3", "echo no version set >&2; exit 127")
        result = self.bash("find_python || echo none")
        self.assertIn(result.stdout, ("/usr/bin/python3\n", "none\n"))

    def test_makes_venv_anew_only_when_broken(self):
        first = self.bash("ln -s gone .venv; prepare_venv; touch .venv/kept; prepare_venv")
        self.assertEqual((first.returncode, first.stdout.count("making .venv")), (0, 1), first.stderr)
        self.assertTrue((self.tree / ".venv/kept").exists())
        second = self.bash("touch $interrupted; prepare_venv; $venv_python -c 'import pip'")
        self.assertEqual((second.returncode, second.stdout.count("making .venv")), (0, 1), second.stderr)
        self.assertFalse((self.tree / ".venv/kept").exists())

    def test_names_wheels_that_are_missing_or_of_another_version(self):
        (self.tree / ".venv/bin").mkdir(parents=True)
        (self.tree / ".venv/bin/python").symlink_to(sys.executable)
        (self.tree / "wheels.txt").write_text("# Why.\npip==0.0.1\nno-such-wheel==1.0\n")
        result = self.bash("missing_wheels wheels.txt")
        self.assertEqual(result.stdout, "pip==0.0.1\nno-such-wheel==1.0\n", result.stderr)
        version = subprocess.run([sys.executable, "-c", "import importlib.metadata as m; print(m.version('pip'))"],
                                 capture_output=True, text=True).stdout.strip()
        (self.tree / "wheels.txt").write_text(f"pip=={version}\n")
        self.assertEqual(self.bash("missing_wheels wheels.txt").stdout, "")


if __name__ == "__main__":
    unittest.main()
