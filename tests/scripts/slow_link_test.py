"""scripts/slow_link: the loopback carries the rate asked for, exit codes pass, wrong use is refused in one line."""
import os
import subprocess
import sys
import unittest
from pathlib import Path

SLOW_LINK = Path(__file__).resolve().parents[2] / "scripts" / "slow_link"
# Prints the Mbit/s of one TCP stream of argv[1] bytes over the loopback.
STREAM = """
import socket, sys, threading, time
count = int(sys.argv[1])
server = socket.create_server(("127.0.0.1", 0))
def receive():
    peer, _ = server.accept()
    left = count
    while left:
        left -= len(peer.recv(min(left, 1 << 20)))
    peer.sendall(b"x")
threading.Thread(target=receive).start()
client = socket.create_connection(server.getsockname())
start = time.monotonic()
client.sendall(bytes(count))
client.recv(1)
print(count * 8 / (time.monotonic() - start) / 1e6)
"""


def run(*arguments):
    return subprocess.run([SLOW_LINK, *arguments], capture_output=True, text=True, timeout=60)


def has_namespaces():
    limit = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", "66kb",
             "latency", "50ms"]
    env = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    try:
        return subprocess.run(limit, capture_output=True, env=env, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


class Refused(unittest.TestCase):
    def test_wrong_use(self):
        for arguments in [("1gbit", "true"), ("1gbit", "--"), ("1gbi", "--", "true"), ("-5mbit", "--", "true"), ()]:
            with self.subTest(arguments):
                result = run(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(len(result.stderr.splitlines()), 1)

    @unittest.skipUnless(os.geteuid() == 0, "only root can be someone else")
    def test_without_root(self):
        result = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", "bash", "-s", "1gbit", "--", "true"],
                                input=SLOW_LINK.read_text(), capture_output=True, text=True, timeout=60)
        self.assertEqual((result.returncode, result.stderr),
                         (2, "slow_link: needs root (a network namespace with a limited loopback)\n"))


@unittest.skipUnless(has_namespaces(), "no network namespaces here")
class Limited(unittest.TestCase):
    def test_rate(self):
        for rate, mbit in (("50mbit", 50), ("200mbit", 200)):
            with self.subTest(rate):
                # The limit holds always; that a busy machine keeps up with it may take a second try.
                for _ in range(3):
                    result = run(rate, "--", sys.executable, "-c", STREAM, str(mbit * 1_000_000 // 16))
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertLess(float(result.stdout), 1.1 * mbit)
                    if float(result.stdout) > 0.9 * mbit:
                        break
                else:
                    self.fail(f"{result.stdout} Mbit/s of {mbit}")

    def test_nothing_remains_outside(self):
        before = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True).stdout
        inside = run("10mbit", "--", "tc", "qdisc", "show", "dev", "lo").stdout
        after = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True).stdout
        self.assertIn("tbf", inside)
        self.assertEqual(before, after)

    def test_exit_code_and_no_limit(self):
        self.assertEqual(run("none", "--", "sh", "-c", "exit 7").returncode, 7)
        self.assertNotIn("tbf", run("none", "--", "tc", "qdisc", "show", "dev", "lo").stdout)


if __name__ == "__main__":
    unittest.main()
