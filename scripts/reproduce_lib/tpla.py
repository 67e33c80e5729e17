"""The tables and figures of the TPLA paper."""
import re
import sys

from reproduce_lib import records
from reproduce_lib.pages import Curves, draw, markdown, number, section
from reproduce_lib.records import PAPERS, ROOT, find, paper_rows, parlat, record_of, used


def perplexity(args):
    size = ["--groups", "2,4"]
    if args.quick:
        size = ["--groups", 2, "--tokens", 2000, "--calibration-tokens", 8192, "--fit-steps", 100]
    work = records.OUT / "slicing"
    record = record_of("slicing", [sys.executable, ROOT / "scripts" / "bench_slicing", "--model", args.model, "--data",
                                   args.data, "--work", work, *size, "--json", "JSON"], folder=work)
    columns = ["mla", "gla", "tpla", "aligned", "exact prefill"]
    rows = [[f"paper, {row['model']}", *(number(row[column]) for column in columns)]
            for row in paper_rows("tpla", "perplexity")]
    cell = {(row["layout"], row["groups"], row["text"], row["prefill"]): row for row in record["rows"]}
    groups = sorted({row["groups"] for row in record["rows"]})[1:]
    plain, after_exact = (cell["mla", 1, "text", prefill]["perplexity"] for prefill in ("sliced", "exact"))
    curves = Curves()
    for n in groups:
        gla = cell["gla", n, "text", "sliced"]["perplexity"]
        for layout, value in (("mla", plain), ("gla", gla)):
            curves.add(f"{n} groups", layout, value)
        for transform in ("hadamard", "pca", "balanced"):
            sliced, exact = (cell[f"tpla {transform}", n, "text", prefill]["perplexity"] for prefill in ("sliced", "exact"))
            fitted = transform == "balanced"
            rows.append([f"ours, {args.model.name}, {n} groups, {transform}", number(plain, 3), number(gla, 3),
                         "-" if fitted else number(sliced, 3), number(sliced, 3) if fitted else "-",
                         f"{exact:.3f} (mla {after_exact:.3f})"])
            curves.add(f"{n} groups", f"tpla {transform}", sliced)
    figure = draw("perplexity.svg", f"perplexity of {args.model.name}, every token from the sliced cache", "layout",
                  "perplexity", curves, yscale="log" if gla > 10 * plain else "linear")
    return section("tpla", "perplexity", f"measured here on `{args.model.name}` (a model of this repository unless another "
                   f"is given), text `{args.data.name}`. The paper aligns by training on text; our `balanced` slices are "
                   "fitted layer by layer and no weight is trained. Ours normalises the whole latent exactly. "
                   "Of each window the second half counts, in every column.",
                   markdown(["", *columns], rows), figure)


def order_of_harm(args):
    """Of what was sliced for `perplexity`, which comes before."""
    rows = [[f"paper: {row['sliced']}", row["harm"], ""] for row in paper_rows("tpla", "order_of_harm")]
    slicing = find(used, command="bench_slicing")
    harm = {}
    for transform in ("hadamard", "pca"):
        softmax = find(slicing["rows"], layout=f"tpla {transform}", groups=2, text="text", prefill="sliced")
        both = parlat(f"harm-{transform}", "eval", "--model", records.OUT / "slicing" / transform, "--data", args.data,
                      "--layout", "tpla", "--groups", 2, "--ranks", "local:2", "--sequence", 512, "--prompt", 256,
                      "--tokens", softmax["tokens"], "--prefill", "sliced", "--slice-norm")["rows"][0]
        harm[transform] = (softmax, both)
    rows += [[f"ours: {what}", *(f"{harm[transform][i]['perplexity']:.3f} (KL {harm[transform][i]['kl']:.1e})"
                                 for transform in harm)] for i, what in enumerate(("softmax", "both"))]
    return section("tpla", "order_of_harm", f"perplexity of `{args.model.name}` as in the table before, two groups, with and "
                   "without `--slice-norm`. The norm alone is not measured: parlat normalises the whole latent, and slices "
                   "of it exist only where the softmax is sliced, too.",
                   markdown(["sliced", "hadamard", "pca"], rows))


def cache(args):
    record = parlat("cache-v3", "inspect", "--model-config", "v3")
    rows = []
    for row in paper_rows("tpla", "cache"):
        groups = {"mla": 1, "tpla": 2}[row["layout"]]
        ours = find(record["config"]["predicted_cache"], layout=row["layout"], groups=groups, ranks=2)
        rows.append([row["layout"], row["elements"], number(ours["cache_elements_per_token_and_layer"], 0)])
    return section("tpla", "cache", "closed form, DeepSeek-V3, two ranks.", markdown(["layout", "paper", "ours"], rows))


def throughput(args):
    contexts, budget, steps = ("1024,8192", "128MB", 3) if args.quick else ("1024,4096,16384,32768", "640MB", 5)
    record = parlat("decode", "bench", "decode", "--model-config", "examples/v2-lite-attention", "--layouts", "mla,tpla",
                    "--ranks", "local:2", "--context", contexts, "--cache-budget", budget, "--steps", steps)
    header = ["", "context", "batch, mla / tpla", "tokens/s", "ratio"]
    rows, curves = [], Curves()
    for row in paper_rows("tpla", "throughput_ratio"):
        rows.append([f"paper, {row['model']}", row["context"], "", "", row["ratio"]])
        curves.add(f"paper, {row['model']}", row["context"], row["ratio"])
    runs = [("measured here", record["rows"], "batch", "tokens_per_s")]
    for model in ("v3", "k2"):
        planned = plan_decode(f"plan-decode-{model}", model, SERVED, {})
        runs.append((f"planned, {model}", planned, "batch", "predicted_tokens_per_s"))
    for label, ours, batch, speed in runs:
        for tpla in (row for row in ours if row["layout"] == "tpla" and row["groups"] == 2):
            mla = find(ours, layout="mla", context=tpla["context"])
            rows.append([label, tpla["context"], f"{mla[batch]} / {tpla[batch]}",
                         f"{number(mla[speed], 1)} / {number(tpla[speed], 1)}", number(tpla[speed] / mla[speed])])
            curves.add(label, tpla["context"], tpla[speed] / mla[speed])
    figure = draw("decode.svg", "tpla over mla at equal memory, two ranks", "context", "ratio of tokens/s", curves,
                  xscale="log")
    return section("tpla", "throughput_ratio", "measured here with V2-Lite's attention, two ranks, as many sequences as fit in "
                   "one budget of cache; planned on two H800 that hold attention alone (whole models do not fit in two), "
                   "split and overlapped as a server would (the table after this one).",
                   markdown(header, rows), figure)


# What of the paper's program and machine is not known, from what parlat's decoder does to what comes closest: flags of
# plan decode, other figures of the machine, the most sequences in a batch.
SERVED = ["--split-projections", "--two-batches"]
ASSUMPTIONS = [
    ("as parlat decodes: every rank projects all heads", [], {}, None),
    ("projections split between the slices, queries and outputs exchanged", SERVED[:1], {}, None),
    ("the same in two batches, one computing while the other exchanges (*)", SERVED, {}, None),
    ("(*), an exchange starts in 20 us, as NCCL's, instead of 4.4", SERVED, {"decode_latency_us": 20}, None),
    ("(*), exchanges take no time", SERVED, {"overlap": 1, "decode_latency_us": 0.001, "gb_per_s": 1e6}, None),
    ("(*), exchanges take no time, a layer's fixed time is 20 us instead of 150", SERVED,
     {"overlap": 1, "decode_latency_us": 0.001, "gb_per_s": 1e6, "layer_overhead_us": 20}, None),
    ("(*), attention at 420 TFLOP/s instead of 660", SERVED, {"decode_tflops": 420}, None),
    ("(*), 40 GB for weights and cache", [*SERVED, "--memory", "40GB"], {}, None),
    ("(*), 141 GB", [*SERVED, "--memory", "141GB"], {}, None),
    ("(*), at most 256 sequences", [*SERVED, "--batch", 256], {}, 256)]


def plan_decode(name, model, flags, changes):
    """Rows of attention alone on two ranks of the H800 description, some of whose first figures of a name are changed."""
    text = (ROOT / "machines" / "h800x8-roce.toml").read_text()
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = .*", f"{key} = {value}", text, count=1)
        assert found, key
    machine = records.OUT / "h800.toml"
    machine.write_text(text)
    rows = parlat(name, "plan", "decode", "--model-config", model, "--machine", machine, "--ranks", 2, "--attention-only",
                  "--context", "1024,4096,16384,32768", *flags)["rows"]
    return [row for row in rows if row["fits"]]


def ratio_of(rows, context, most):
    """tpla's tokens/s over mla's, each in its largest batch of at most `most`."""
    speeds = []
    for layout, groups in (("tpla", 2), ("mla", 1)):
        steps = [row for row in rows if (row["layout"], row["groups"], row["context"]) == (layout, groups, context)
                 and row["batch"] <= (most or row["batch"])]
        speeds.append(max(steps, key=lambda row: row["batch"])["predicted_tokens_per_s"])
    return speeds[0] / speeds[1]


def assumptions(args):
    cells = paper_rows("tpla", "throughput_ratio")
    models = {"DeepSeek-V3": "v3", "Kimi-K2": "k2"}
    rows = [["paper", *(cell["ratio"] for cell in cells)]]
    for label, flags, changes, most in ASSUMPTIONS:
        planned = {name: plan_decode("assumption", model, flags, changes) for name, model in models.items()}
        line = [label]
        for cell in cells:
            ratio = ratio_of(planned[cell["model"]], cell["context"], most)
            line.append(f"{ratio:.2f} ({100 * (ratio / cell['ratio'] - 1):+.0f} %)")
        rows.append(line)
    return ("## What of the paper's program would explain its ratios\n\nOurs: planned, attention alone on two H800, each layout in "
            "the largest batch that fits in 80 GB unless a line says otherwise; in brackets how far from the paper. The paper "
            "states neither machine, batches, what of the model ran, nor how projections are split.\n\n"
            + markdown(["assumption", *(f"{cell['model']}, {cell['context']:,}" for cell in cells)], rows) + "\n")


def paper_only(table, why):
    """The paper's table, and why there is none of ours."""
    spec = PAPERS["tpla"][table]
    rows = [[number(cell) if isinstance(cell, float) else cell for cell in row] for row in spec["rows"]]
    return lambda args: section("tpla", table, why, markdown(spec["columns"], rows))


TABLES = [perplexity, order_of_harm, cache, throughput, assumptions,
          paper_only("first_token", "not measured: `generate --prefill exact` and `sliced` run both, but no command reports the "
                     "seconds of a prompt, and those of `examples/small`, whose context ends at 1,024 tokens, are fewer than a "
                     "program's start takes."),
          paper_only("longbench", "not run: the texts are not here. `eval --copied` and `scripts/bench_slicing` measure how "
                     "often a passage that came before is gone on with rightly.")]
