"""Whether the `tokenizers` package makes the same tokens. usage: tokenizers_package.py JOBS

JOBS is a JSON file: {"texts": [{"tokenizer": FILE, "text": FILE, "ids": FILE of int32}],
"classes": [{"pattern": P, "unassigned": FILE, "matched": FILE}]}. A class matches one character; code points that one
side's Unicode version has no character for may differ.
"""

import array
import functools
import json
import pathlib
import sys

import tokenizers


def read_ids(path):
    ids = array.array("i")
    ids.frombytes(pathlib.Path(path).read_bytes())
    return ids.tolist()


def check_text(job):
    text = pathlib.Path(job["text"]).read_bytes().decode()
    tokenizer = tokenizers.Tokenizer.from_file(job["tokenizer"])
    [want] = tokenizer.encode_batch_fast([text], add_special_tokens=False)  # without offsets
    got, want = read_ids(job["ids"]), want.ids
    if got == want:
        return []
    first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
    return [f"{job['tokenizer']}: {job['text']}: token {first} of {len(want)}: got {got[first:first + 5]}, expected "
            f"{want[first:first + 5]}, behind {tokenizer.decode(want[max(0, first - 10):first])!r}"]


@functools.cache
def matched(pattern):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"(?:{pattern})+"), "removed", invert=True)
    found = set()
    for begin in range(0, 0x110000, 0x800):  # offsets within a text take the square of its length
        if begin != 0xD800:  # surrogates
            for piece, _ in split.pre_tokenize_str("".join(map(chr, range(begin, begin + 0x800)))):
                found.update(map(ord, piece))
    return found


def check_class(job):
    got = set(read_ids(job["matched"]))
    differ = got ^ matched(job["pattern"])
    differ -= set(read_ids(job["unassigned"])) | matched(r"\p{Cn}")
    if not differ:
        return []
    some = ", ".join(f"U+{c:04X} {'only here' if c in got else 'only there'}" for c in sorted(differ)[:20])
    return [f"{job['pattern']}: {len(differ)} differ: {some}"]


def main():
    jobs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    faults = [fault for job in jobs.get("texts", []) for fault in check_text(job)]
    faults += [fault for job in jobs.get("classes", []) for fault in check_class(job)]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
