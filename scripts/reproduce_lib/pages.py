"""What pages are made of: tables, sections and drawings."""
from reproduce_lib.records import PAPERS, ROOT

RESULTS = ROOT / "docs" / "results"


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value, digits=2):
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if value == 0 or abs(value) >= 10**-digits else f"{value:.1e}"


def section(paper, table, how, body, figure=None):
    what = PAPERS[paper][table]["what"]
    parts = [f"## {what[0].upper() + what[1:]}", f"Ours: {how}", body]
    if figure:
        parts.append(f"![{table}]({figure})")
    return "\n\n".join(parts) + "\n"


class Curves(dict):
    """{label: ([x], [y])}"""

    def add(self, label, x, y):
        xs, ys = self.setdefault(label, ([], []))
        xs.append(x)
        ys.append(y)


def draw(file, title, x_label, y_label, curves, **scales):
    """A label of the paper's is drawn as points."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": file, "font.size": 9})
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for label, (x, y) in curves.items():
        style = "o" if label.startswith("paper") else "o-" if len(x) < 6 else "-"
        axes.plot(x, y, style, label=label, markersize=4, linewidth=1.2)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, **scales)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / file, metadata={"Date": None})
    pyplot.close(figure)
    return file
