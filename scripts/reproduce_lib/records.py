"""The records of commands: run, kept in out/reproduce, used again; and the papers' own tables."""
import functools
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARLAT = ROOT / "build" / "release" / "parlat"
OUT = ROOT / "out" / "reproduce"
PAPERS = json.loads((ROOT / "scripts" / "paper_tables.json").read_text())

used = []  # the records of this page


def refuse(message, exit_code=1):
    print(f"reproduce: {message}", file=sys.stderr)
    sys.exit(exit_code)


@functools.cache
def program_version():
    return subprocess.run([PARLAT, "--version"], check=True, capture_output=True, text=True).stdout.strip()


def contents(path):
    """A hash of a file; of a folder's descriptions, and when its weights, too large to read, were written."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    parts = [part for file in files for part in (file.name.encode(), file.read_bytes())]
    parts += [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()
              for file in sorted(path.glob("*.safetensors"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def key_of(command, folder):
    """What a record is of: the command's words, the program, and the files and folders among the words but its own."""
    lines = [program_version()]
    for word in map(str, command):
        read = (ROOT / word).exists() and word != str(folder)
        lines.append(f"{word} {contents(ROOT / word)}" if read else word)
    return "\n".join(lines)


def record_of(name, command, folder=None):
    """The record that `command` writes, whose word JSON stands for its file; the one at hand if it was measured with the
    same key. What is only computed is computed anew. `folder` is the command's own, emptied before."""
    file, words, key = OUT / f"{name}.json", OUT / f"{name}.command", key_of(command, folder)
    computed = any(word in ("plan", "--dry-run", "--as-published") for word in command)
    command = [str(file) if word == "JSON" else str(word) for word in command]
    if computed or not (words.exists() and words.read_text() == key):
        print(f"  {name}", file=sys.stderr, flush=True)
        words.unlink(missing_ok=True)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        if done.returncode != 0:
            refuse(f"exit {done.returncode} of {' '.join(command)}")
        words.write_text(key)
    used.append(json.loads(file.read_text()))
    return used[-1]


def parlat(name, *arguments, folder=None):
    quiet = ["--quiet"] if arguments[0] in ("bench", "train") else []
    return record_of(name, [PARLAT, *arguments, *quiet, "--json", "JSON"], folder)


def model_config(name, **changes):
    """A config.json of one dense layer with V3's widths and queries straight from the input, as the paper's prototype."""
    config = {"model_type": "deepseek_v3", "vocab_size": 2048, "hidden_size": 7168, "intermediate_size": 8192,
              "num_hidden_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": None,
              "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
              "n_routed_experts": None, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 163840}
    file = OUT / f"{name}.config.json"
    file.write_text(json.dumps(config | changes))
    return file


def find(rows, **keys):
    """The one row that has these values; None where none has."""
    found = [row for row in rows if all(row[key] == value for key, value in keys.items())]
    if len(found) > 1:
        refuse(f"{len(found)} rows with {keys}")
    return found[0] if found else None


def paper_rows(paper, table):
    columns = PAPERS[paper][table]["columns"]
    return [dict(zip(columns, row)) for row in PAPERS[paper][table]["rows"]]
