"""read_back.py TOLERANCE FOLDER...: whether transformers reads each model whole and agrees on its logits."""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file

transformers.utils.logging.disable_progress_bar()
tolerance = float(sys.argv[1])
failed = False
for folder in map(pathlib.Path, sys.argv[2:]):
    expected = load_file(folder / "expected.safetensors")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {key: names for key, names in info.items() if names}
    with torch.no_grad():
        logits = model(expected["tokens"]).logits
    error = ((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
    if problems or not error <= tolerance:
        failed = True
        print(f"{folder.name}: relative error {error:.2e} against {tolerance:.2e} allowed; loading: {problems}")
sys.exit(failed)
