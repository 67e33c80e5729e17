"""The tables and figures of the LAGA paper."""
import itertools
import json
import os
import random
import re
import shutil
import string

from reproduce_lib import records
from reproduce_lib.pages import Curves, draw, markdown, number, section
from reproduce_lib.records import ROOT, find, model_config, paper_rows, parlat, record_of

FORMS = ["explicit", "absorbed", "laga"]


def dry_run(name, *arguments):
    return parlat(name, "bench", "attention", "--dtype", "bf16", *arguments)["rows"]


def bytes_sent(args):
    rows, curves = [], {}
    ours = dry_run("bytes", "--dry-run", "--model-config", "v3", "--ranks", "local:4,8,16", "--sequence", "4096,8192,16384",
                   "--pass", "forward", "--forms", ",".join([*FORMS, "laga-q", "ring"]))
    for row in paper_rows("laga", "bytes_mb"):
        cells = {}
        for form in (*FORMS, "laga-q"):
            found = find(ours, form=form, ranks=row["ranks"], sequence=row["sequence"])
            cells[form] = (found["paper_bytes"] / 1e6, found["sent_bytes_forward"]["total"] / 1e6)
        rows.append([row["ranks"], row["sequence"],
                     *(f"{row[form]} / {cells[form][0]:.1f}" for form in ("explicit", "laga")),
                     *(f"{cells[form][1]:.1f}" for form in ("explicit", "laga", "laga-q"))])
    for form in ("explicit", "laga", "laga-q", "ring"):
        line = sorted((row["sequence"], row["sent_bytes_forward"]["total"] / 1e6) for row in ours
                      if row["form"] == form and row["ranks"] == 8)
        curves[form] = tuple(zip(*line))
    figure = draw("bytes.svg", "sent on the wire, 8 ranks, forward", "sequence", "MB a rank", curves)
    return section("laga", "bytes_mb", "dry run at the paper's size. Paper / ours in the paper's counting (all-to-all at 4 "
                   "bytes an element, one gathered shard once at 2), then what bf16 really sends.",
                   markdown(["ranks", "sequence", "explicit", "laga", "wire: explicit", "laga", "laga-q"], rows), figure)


def bytes_by_heads(args):
    ours = dry_run("bytes-heads", "--dry-run", "--model-config", "v3", "--d-model", 2048, "--heads", "16,32,64,128",
                   "--ranks", "local:8", "--sequence", 8192, "--pass", "forward", "--forms", "explicit,laga")
    rows = []
    for row in paper_rows("laga", "bytes_by_heads"):
        explicit, laga = (find(ours, form=form, heads=row["heads"]) for form in ("explicit", "laga"))
        wire = explicit["sent_bytes_forward"]["total"] / laga["sent_bytes_forward"]["total"]
        rows.append([row["heads"], row["ratio"], number(explicit["paper_bytes"] / laga["paper_bytes"]), number(wire)])
    return section("laga", "bytes_by_heads", "dry run.",
                   markdown(["heads", "paper", "ours, its counting", "on the wire"], rows))


def peaks(kernel, published, **shape):
    words = [word for key, value in shape.items() for word in (f"--{key}", value)]
    name = "-".join(["memory", kernel, "published" if published else "ours", *map(str, shape.values())]).replace("/", "_")
    how = ["--as-published"] if published else ["--dry-run", "--forms", ",".join(FORMS)]
    config = model_config("v3-direct-query")
    return dry_run(name.replace(":", ""), *how, "--kernel", kernel, "--model-config", config, *words)


def memory(args):
    rows, curves, ours = [], {"eager": Curves(), "fused": Curves()}, {}
    above = {"paper": [], "as published": [], "parlat": []}
    for kernel in ("eager", "fused"):
        for published in (True, False):
            ours[kernel, published] = peaks(kernel, published, ranks="local:4,8", sequence="4096,8192,16384")

    def mb(kernel, published, row):
        cells = (find(ours[kernel, published], form=form, ranks=row["ranks"], sequence=row["sequence"]) for form in FORMS)
        return [cell["peak_activation_bytes"] / 1e6 for cell in cells]

    def scores_mb(kernel, row):
        """Of absorbed's published peak beyond explicit's: tensors as large as all scores."""
        held = [find(ours[kernel, True], form=form, ranks=row["ranks"], sequence=row["sequence"])["peak_sites"]
                for form in ("absorbed", "explicit")]
        sums = [sum(size for name, size in cell.items() if "scores" in name or "probabilities" in name) for cell in held]
        return (sums[0] - sums[1]) / 1e6

    def text(cells):
        return " / ".join(number(cell, 0) for cell in cells)

    for row in paper_rows("laga", "memory_mb"):
        paper, published, well = [row[form] for form in FORMS], mb(row["kernel"], True, row), mb(row["kernel"], False, row)
        added = [cells[1] - cells[0] for cells in (paper, published, well)]
        excess = [100 * (cells[2] / cells[0] - 1) for cells in (paper, published, well)]
        for label, percent in zip(above, excess):
            if percent > 0.5:
                above[label].append(f"{percent:.1f} % ({row['kernel']}, {row['ranks']} ranks, {row['sequence']:,})")
        rows.append([row["kernel"], row["ranks"], row["sequence"], text(paper), text(published), text(well),
                     *(number(value, 0) for value in (*added[:2], scores_mb(row["kernel"], row), added[2])),
                     f"{100 * (added[1] / added[0] - 1):+.1f} %", " / ".join(f"{percent:+.1f}" for percent in excess)])
        if row["ranks"] == 8:
            for label, cells in (("paper", paper), ("as published", published), ("parlat", well)):
                for form, value in zip(("explicit", "absorbed"), cells):
                    curves[row["kernel"]].add(f"{label} {form}", row["sequence"], value / 1e3)
    parts = [markdown(["kernel", "ranks", "sequence", "paper: explicit / absorbed / laga", "dry run, as published",
                       "dry run, parlat's forms", "absorbed adds: paper", "as published", "of it scores", "parlat",
                       "published to paper", "laga over explicit, %: paper / as published / parlat"], rows)]
    parts.append("The paper says that laga is within 0.5 % of explicit. Above that are, "
                 + "; ".join(f"{label}: {', '.join(cells) or 'none'}" for label, cells in above.items())
                 + ". The excess is the gathered latent of the other ranks' tokens, and its share what it is set beside: "
                 "the paper's peaks hold weights and more, ours what a pass allocates. parlat's fused laga keeps the latent "
                 "alone for the backward pass (`--save latent`), so it needs less than explicit. "
                 "Peaks as published hold the layer's output as well, as a script does that keeps it; parlat's do not, "
                 "since a model adds it to the residual stream.")
    for kernel in ("eager", "fused"):
        figure = draw(f"memory-{kernel}.svg", f"peak activation, 8 ranks, {kernel}", "sequence", "GB a rank", curves[kernel])
        parts.append(f"![memory, {kernel}]({figure})")
        parts.append(f"What the peak at 8 ranks, 16,384 tokens consists of, {kernel}, MB:\n\n" + sites(ours, kernel))
    return section("laga", "memory_mb", "dry runs of one layer, queries straight from the input: once with the operations of "
                   "the paper's prototype (`--as-published`), once as parlat computes. Most of what absorbed adds in the paper "
                   "is score matrices; what the paper's cells hold beside, in all three forms alike, cancels.", "\n\n".join(parts))


def sites(ours, kernel):
    columns = [("as published", True, form) for form in FORMS] + [("parlat", False, "absorbed"), ("parlat", False, "laga")]
    held = [find(ours[kernel, published], form=form, ranks=8, sequence=16384)["peak_sites"]
            for _, published, form in columns]
    names = sorted({name for cell in held for name, size in cell.items() if size >= 0.01 * sum(cell.values())},
                   key=lambda name: (-max(cell.get(name, 0) for cell in held), name))
    rows = [[name, *(number(cell[name] / 1e6, 0) if name in cell else "" for cell in held)] for name in names]
    return markdown(["tensor", *(f"{how}: {form}" for how, _, form in columns)], rows)


def memory_by_heads(args):
    rows = []
    shape = {"ranks": "local:8", "sequence": 8192, "d-model": 2048, "heads": "16,32,64,128"}
    ours = {published: peaks("eager", published, **shape) for published in (True, False)}
    for row in paper_rows("laga", "memory_by_heads"):
        added = [find(ours[published], form="absorbed", heads=row["heads"])["peak_activation_bytes"]
                 - find(ours[published], form="explicit", heads=row["heads"])["peak_activation_bytes"]
                 for published in (True, False)]
        rows.append([row["heads"], row["added"], *(number(value / 1e6, 0) for value in added)])
    return section("laga", "memory_by_heads", "dry runs.",
                   markdown(["heads", "paper", "as published", "parlat's absorbed"], rows))


TABLE_3_SHARE = 0.43  # written_share, from Table 3's explicit column (docs/plan.md)
LAYERS = 4  # of the paper's model; a plan's times are of one


def plan(name, machine, kernel, heads, ranks, nodes, sequences):
    return parlat(name, "plan", "train", "--model-config", model_config("v3-direct-query"), "--machine", machine,
                  "--as-published", "--kernel", kernel, "--heads", heads, "--ranks", ranks, "--nodes", nodes, "--layers", LAYERS,
                  "--mlp-width", 8192, "--sequence", ",".join(map(str, sequences)))


def machine_with(name, pattern, replacement):
    """A file with the paper's cluster, but for one figure."""
    machine = records.OUT / f"{name}.toml"
    machine.write_text(re.sub(pattern, replacement, (ROOT / "machines" / "ascend910b-roce.toml").read_text()))
    return machine


def planned_ms(rows, form, sequence):
    """Of the fastest split of the form."""
    times = [row["predicted_ms"]["total"] for row in rows
             if row["form"] == form and row["sequence"] == sequence and row.get("predicted_ms")]
    return min(times) if times else None


def ratio(over, under):
    return over / under if over and under else None


def tokens_per_s(args):
    rows, curves, keys = [], Curves(), ("kernel", "heads", "ranks", "nodes")
    papers = paper_rows("laga", "tokens_per_s")
    of_table_3 = machine_with("table-3", r"(\[attention\.bf16\]\n)", rf"\1written_share = {TABLE_3_SHARE}\n")
    for row in papers:
        block = [row[key] for key in keys]
        sequences = sorted({other["sequence"] for other in papers if [other[key] for key in keys] == block})
        machine = of_table_3 if row["table"] == 3 else "ascend910b-roce"
        ours = plan("-".join(map(str, ["plan", *block])), machine, *block, sequences)["rows"]
        ms = {form: planned_ms(ours, form, row["sequence"]) for form in FORMS}
        speeds = [[row[form] for form in FORMS], [ratio(1e3 * row["sequence"] / LAYERS, ms[form]) for form in FORMS]]
        pairs = [" / ".join(number(value, 0) for value in cells) for cells in speeds]
        for form in ("laga", "absorbed"):
            paper, predicted = ratio(row[form], row["explicit"]), ratio(ms["explicit"], ms[form])
            off = f"{100 * (predicted / paper - 1):+.0f} %" if paper and predicted else "-"
            pairs += [number(paper), number(predicted), off]
            if form == "laga" and row["table"] in (4, 5) and row["kernel"] == "fused":
                for label, value in (("paper", paper), ("planned", predicted)):
                    curves.add(f"{label}, {row['nodes']} node{'s' * (row['nodes'] > 1)}", row["sequence"], value)
        rows.append([row["table"], *block[:3], row["sequence"], *pairs])
    for speed in (1, 20, 50):
        machine = machine_with(f"link-{speed}", r"(\[link\.between\][^\[]*gb_per_s = )[\d.]+", rf"\g<1>{speed}")
        sequences = (4096, 8192, 16384)
        ours = plan(f"plan-link-{speed}", machine, "fused", 128, 16, 2, sequences)["rows"]
        curves[f"planned, {speed} GB/s between nodes"] = (
            sequences, [planned_ms(ours, "explicit", n) / planned_ms(ours, "laga", n) for n in sequences])
    figure = draw("throughput.svg", "laga over explicit, fused, 128 heads", "sequence", "ratio of tokens/s", curves)
    header = ["table", "kernel", "heads", "ranks", "sequence", "paper: explicit / absorbed / laga", "planned",
              "laga / explicit: paper", "planned", "off",
              "absorbed / explicit: paper", "planned", "off"]
    return section("laga", "tokens_per_s", "planned from one description of the cluster (`machines/ascend910b-roce.toml`), "
                   "which knows the explicit column of the fused blocks and no other figure; for Table 3 besides with "
                   f"`written_share = {TABLE_3_SHARE}`, which its own explicit column says (docs/plan.md).",
                   markdown(header, rows), figure)


def crossover(args):
    sequences = [1 << k for k in range(10, 18)]
    ours = plan("plan-crossover", "ascend910b-roce", "fused", 128, 16, 2, sequences)
    curves = {form: (sequences, [planned_ms(ours["rows"], "laga", n) / planned_ms(ours["rows"], form, n) for n in sequences])
              for form in ("explicit", "absorbed", "laga", "ring", "hybrid")}
    figure = draw("crossover.svg", "16 ranks on two nodes, fused, planned", "sequence", "tokens/s over laga's", curves,
                  xscale="log")
    advice = [[f"{row['sequence']:,}", row["reason"]] for row in ours["config"]["advice"]]
    points = [[f"{point['sequence']:,}", point["form"], point["rival"], "yes" if point["wins"] else "no",
               turn(point["tokens"], ("above", "below"), 1, "tokens"),
               turn(point["bytes_per_s"], ("below", "above"), 1e9, "GB/s")]
              for point in ours["config"]["crossovers"]]
    header = ["sequence", "form", "rival", "faster here", "with sequences", "with links between nodes"]
    return ("## Where forms overtake each other\n\nOurs: planned, the paper's two nodes; the paper draws explicit, absorbed and "
            f"laga only.\n\n{markdown(['sequence', 'to use'], advice)}\n\nWhere a form is faster than its rival, all else "
            f"as planned; -: as it is here, whatever it is.\n\n{markdown(header, points)}\n\n![crossover]({figure})\n")


def turn(point, sides, unit, name):
    """Where a crossover of the plan's record has its form faster; beyond is to longer sequences, and to slower links."""
    if not point:
        return "-"
    return f"{sides[0 if point['wins_beyond'] else 1]} {number(point['at'] / unit, 0 if unit == 1 else 1)} {name}"


def measured(args):
    ranks, sequences = ("local:2", "512,1024") if args.quick else ("local:2,4", "1024,2048,4096")
    shape = ["--model-config", "v2-lite", "--sequence", sequences, "--dtype", "fp32", "--repeats", 3, "--forms",
             ",".join(FORMS)]
    runs = {"none": parlat("measured", "bench", "attention", "--ranks", ranks, *shape)}
    if not args.quick and os.geteuid() == 0:
        tcp = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
        for link in ("1gbit", "200mbit"):
            runs[link] = record_of(f"measured-{link}", [
                ROOT / "scripts" / "slow_link", link, "--", "mpirun", "-n", 4, "--allow-run-as-root", "--oversubscribe",
                "--bind-to", "none", *tcp, records.PARLAT, "bench", "attention", "--ranks", "mpi", *shape, "--timeout", 600, "--quiet",
                "--json", "JSON"])
    rows = []
    for link, record in runs.items():
        for explicit in (row for row in record["rows"] if row["form"] == "explicit"):
            keys = {key: explicit[key] for key in ("ranks", "sequence")}
            speed = [find(record["rows"], form=form, **keys)["tokens_per_s"] for form in FORMS]
            rows.append([link, *keys.values(), *(number(value, 0) for value in speed), number(speed[1] / speed[0]),
                         number(speed[2] / speed[0])])
    return ("## The same forms on this machine\n\nOurs: measured here, one block with V2-Lite's widths, 16 heads, fp32, fused, "
            "forward and backward; ranks are threads without a link, MPI processes over a limited one.\n\n"
            + markdown(["link", "ranks", "sequence", *(f"{form} tokens/s" for form in FORMS), "absorbed / explicit",
                        "laga / explicit"], rows) + "\n")


def pair_tokenizer(folder):
    """The bytes of examples/small and 1,664 pairs of a letter and another sign: as many words of one token each."""
    tokenizer = json.loads((ROOT / "examples" / "small" / "tokenizer.json").read_text())
    pairs = list(itertools.product(string.ascii_letters, string.digits + string.punctuation[:22]))
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in pairs]
    tokenizer["model"]["vocab"].update({first + second: 257 + i for i, (first, second) in enumerate(pairs)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(ROOT / "examples" / "small" / "tokenizer_config.json", folder)
    return folder, [first + second for first, second in pairs]


def convergence(args):
    folder = records.OUT / "convergence"
    folder.mkdir(exist_ok=True)
    config = model_config("convergence", hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
                          num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=128, qk_nope_head_dim=32,
                          qk_rope_head_dim=16, v_head_dim=32)
    tokenizer, words = pair_tokenizer(folder)
    draws = random.Random(1)
    (folder / "random.txt").write_text("".join(draws.choice(words) for _ in range(511)))  # and its end: one sequence
    curves = {}
    for form in FORMS if args.quick else [*FORMS, "ring"]:
        run = folder / form
        parlat(f"convergence-{form}", "train", "--model-config", config, "--tokenizer", tokenizer, "--data",
               folder / "random.txt", "--out", run, "--form", form, "--ranks", "local:2", "--sequence", 512, "--batch", 1,
               "--steps", 60, "--schedule", "constant", "--lr", 1e-3, "--weight-decay", 0, "--beta2", 0.999, "--clip", 0,
               "--eval-fraction", 0, folder=run)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves[form] = [line["loss"] for line in lines if "loss" in line]
    first, last, apart = (row["value"] for row in paper_rows("laga", "convergence"))
    rows = [["paper, every form", first, last, "", f"{apart} (laga)"]]
    for form, losses in curves.items():
        apart = [max(abs(a - b) / b for a, b in zip(losses, curves[other])) for other in ("explicit", "absorbed")]
        rows.append([form, number(losses[0], 3), number(losses[-1], 4), *(f"{value:.1e}" for value in apart)])
    figure = draw("convergence.svg", "memorising 512 random tokens", "step", "loss",
                  {form: (range(1, len(losses) + 1), losses) for form, losses in curves.items()}, yscale="log")
    return section("laga", "convergence", "measured here, at the paper's size, fp32, two ranks; tokens are drawn from 1,664 "
                   "of a vocabulary of 2,048. Apart: the largest difference at any step, of the loss. The paper's laga and "
                   "absorbed are bit-identical; ours are not, since absorbed multiplies by w_uk and w_uv elsewhere and so "
                   "rounds other sums. It is laga and explicit that have the same operations on one rank.",
                   markdown(["form", "first loss", "last loss", "apart from explicit", "from absorbed"], rows), figure)


def equality(args):
    record = parlat("equality", "bench", "attention", "--model-config", "v2-lite", "--heads", 8, "--ranks", "local:1,2,4,8",
                    "--sequence", 513, "--dtype", "fp32", "--repeats", 1, "--forms", ",".join(FORMS))
    rows = [[f"paper, {row['what']}", "", "", "", f"{row['value']:.1e}"] for row in paper_rows("laga", "equality")]
    for ranks in (1, 2, 4, 8):
        found = [find(record["rows"], form=form, ranks=ranks) for form in FORMS]
        errors, tensor = [row["max_error"] for row in found], found[2]["worst_tensor"]
        bound = f"at most {errors[0] + errors[2]:.1e} ({tensor})" if found[0]["worst_tensor"] == tensor else "-"
        rows.append([f"ours, {ranks} rank{'s' * (ranks > 1)}", *(f"{error:.1e}" for error in errors), bound])
    return section("laga", "equality", "measured here with V2-Lite's widths, 8 heads, 513 tokens: the error to the fp64 "
                   "oracle of the tensor among output and gradients that uses up most of its tolerance, relative to its "
                   "largest value. The paper's are differences between laga and explicit; where ours both have the same "
                   "tensor, the sum of its errors bounds theirs. At one rank explicit and laga give the same bits (a test).",
                   markdown(["", *(f"{form} to the oracle" for form in FORMS), "laga - explicit"], rows))


def nondeterminism(args):
    record = parlat("nondeterminism", "bench", "nondeterminism")
    run = {(row["model"], row["order"]): row for row in record["rows"]}
    dense, experts = run["dense", "drawn"], run["experts", "drawn"]
    deterministic = max(max(step[key] for key in ("loss_difference", "output_difference", "weight_difference"))
                        for (_, order), row in run.items() if order == "deterministic" for step in row["steps"])
    ratio = {key: experts["last"][key] / dense["last"][key] for key in ("loss_difference", "output_difference")
             if dense["last"][key] > 0}
    jump, flip = experts.get("jump", {}), experts.get("first_flip")
    paper = {row["what"]: row["value"] for row in paper_rows("laga", "nondeterminism")}
    over, step, zero = paper
    rows = [[over, paper[over], number(ratio.get("loss_difference"), 1)],
            ["the same of the final hidden states", "-", number(ratio.get("output_difference"), 1)],
            [step, paper[step], number(jump.get("loss"), 1)],
            ["step of the final hidden states there", "-", number(jump.get("output"), 1)],
            ["first routing flip", "-", f"step {flip['step']}, layer {flip['layer']}" if flip else "none"],
            [zero, paper[zero], number(deterministic, 0)]]
    curves = {}
    for name, row in (("dense", dense), ("experts", experts)):
        points = [(i + 1, step["output_difference"]) for i, step in enumerate(row["steps"]) if step["output_difference"] > 0]
        curves[name] = tuple(zip(*points))
    if flip:
        curves["first routing flip"] = ([flip["step"]] * 2, [min(curves["experts"][1]), max(curves["experts"][1])])
    figure = draw("nondeterminism.svg", "twins with products in drawn orders", "step", "difference of hidden states", curves,
                  yscale="log")
    config = record["config"]
    return section("laga", "nondeterminism", f"measured here, `{config['model_config']}`, {config['batch']} x "
                   f"{config['sequence']} tokens, {config['steps']} steps, {config['dtype']}; every product's sums in an "
                   "order drawn from the twin's seed.", markdown(["", "paper", "ours"], rows), figure)


TABLES = [bytes_sent, bytes_by_heads, memory, memory_by_heads, tokens_per_s, crossover, measured, equality, convergence,
          nondeterminism]
