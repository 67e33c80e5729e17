"""Threads and MPI processes compute the same bits: training and its record agree, twice in a row.

usage: local_and_mpi.py PROGRAM
"""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

STEPS = 12
COMPARED = ("loss", "grad_norm", "sent_bytes", "tokens")  # of every step; the rest is time and memory


def run(program, out, ranks, launcher, arguments):
    text = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    subprocess.run(
        [*launcher, program, "train", "--model-config", "tiny", "--data", str(text), "--out", str(out), "--ranks", ranks,
         "--sequence", "93", "--batch", "2", "--steps", str(STEPS), "--lr", "1e-3", "--seed", "3", "--eval-every", "0",
         "--checkpoint-every", "0", "--quiet", *arguments],
        check=True, stdout=subprocess.DEVNULL, timeout=300)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [{key: line[key] for key in COMPARED} for line in lines if "loss" in line]
    assert len(steps) == STEPS, f"expected {STEPS} steps, got {len(steps)}"
    return steps


def mpirun(ranks):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-n", str(ranks)]


def missing_on_one_rank(program, folder):
    """A file that only rank 1 cannot read is reported, by whom it is missed."""
    (folder / "text.txt").write_text("text " * 1000)
    command = f"""data={folder}/text.txt; [ "$OMPI_COMM_WORLD_RANK" != 1 ] || data={folder}/missing.txt
exec {program} train --model-config tiny --data $data --out {folder}/run --ranks mpi --steps 1 --quiet"""
    failed = subprocess.run([*mpirun(2), "sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode == 3, f"exit code {failed.returncode}: {failed.stderr}"
    expected = "parlat: error: loading: rank 1 failed: " + str(folder / "missing.txt")
    assert expected in failed.stderr, f"{expected!r} is missing in {failed.stderr}"
    print("a file missing on one rank is reported")


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for ranks, arguments in ((2, ["--form", "laga"]), (3, ["--form", "explicit", "--sharding", "zigzag"]),
                                 (3, ["--form", "ring", "--sharding", "zigzag"]),
                                 (4, ["--form", "hybrid", "--sharding", "zigzag", "--ring-groups", "2"]),
                                 (4, ["--form", "absorbed", "--data-parallel", "2", "--expert-parallel", "4"])):
            local = run(program, folder / f"local-{ranks}-{arguments[1]}", f"local:{ranks}", [], arguments)
            for attempt in (1, 2):
                mpi = run(program, folder / f"mpi-{ranks}-{arguments[1]}-{attempt}", "mpi", mpirun(ranks), arguments)
                different = [step for step, (a, b) in enumerate(zip(local, mpi)) if a != b]
                assert not different, (f"{ranks} ranks {arguments}: step {different[0]} is {local[different[0]]} on threads "
                                       f"and {mpi[different[0]]} under MPI")
            print(f"{ranks} ranks {' '.join(arguments)}: the same {STEPS} steps on threads and twice under MPI")
        missing_on_one_rank(program, folder)


if __name__ == "__main__":
    main()
