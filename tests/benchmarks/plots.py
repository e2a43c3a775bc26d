"""Draws pictures in docs/images from the benchmarks' JSON in docs/data.

python tests/benchmarks/plots.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
STYLES = {
  "ordinary": ("black", "o", "ordinary gradient"),
  "bookkeeping": ("tab:blue", "s", "book-keeping"),
  "ghost": ("tab:orange", "^", "ghost"),
  "vmap": ("tab:red", "v", "vmap (jax-privacy)"),
}
CONTRASTIVE = {
  "ordinary": ("black", "o", "ordinary step"),
  "logit exact": ("tab:blue", "s", "logit, exact"),
  "logit bound": ("tab:cyan", "D", "logit, bound"),
  "logit sequential": ("tab:red", "v", "logit, sequential"),
  "row batch all": ("tab:orange", "^", "row, all gradients"),
  "row batch pair": ("tab:green", ">", "row, own pair"),
  "row batch query": ("tab:olive", "<", "row, query"),
  "group": ("tab:purple", "P", "group"),
}
DETECTORS = {
  "cosine of the paper": ("black", "-"),
  "embedding": ("tab:blue", "-"),
  "minhash": ("tab:red", "-"),
  "token set": ("tab:orange", "-"),
  "token set without function words": ("tab:orange", ":"),
  "containment": ("tab:green", "-"),
  "exact": ("tab:purple", "o"),
}
SETTINGS = {
  "svg.hashsalt": "synthq",
  "svg.fonttype": "none",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "font.size": 9,
}


def load(name: str):
  return json.loads((DOCS / "data" / name).read_text())


def save(figure, name: str, legend=None, *, columns=4, room=0.08, **more):
  """Writes a figure, with the legend of these axes below it."""
  if legend is not None:
    handles, labels = legend.get_legend_handles_labels()
    more = {"handles": handles, "labels": labels} | more
  if more:
    figure.legend(
      **more, ncol=columns, frameon=False, loc="lower center", fontsize=8
    )
  figure.tight_layout(rect=(0, room if more else 0, 1, 1))
  figure.savefig(
    DOCS / "images" / name, bbox_inches="tight", metadata={"Date": None}
  )


def growth(cases) -> None:
  """Time and temporaries against the batch, on the CPU."""
  cases = sorted(
    (
      c for c in cases if c["case"]["dim"] == 256 and c["case"]["inputs"] == 128
    ),
    key=lambda c: c["case"]["batch"],
  )
  figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.8))
  for way, (color, marker, label) in STYLES.items():
    found = [c for c in cases if way in c["ways"]]
    timed = [c for c in found if c["ways"][way].get("median_s")]
    style = {"color": color, "marker": marker, "label": label, "markersize": 4}
    left.plot(
      [c["case"]["batch"] for c in timed],
      [c["ways"][way]["median_s"] for c in timed],
      **style,
    )
    right.plot(
      [c["case"]["batch"] for c in found],
      [c["ways"][way]["temporaries_gib"] for c in found],
      **style,
    )
  for axes, name in ((left, "seconds"), (right, "temporaries, GiB")):
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=name)
    batches = [c["case"]["batch"] for c in cases]
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
  right.legend(frameon=False, fontsize=8, loc="lower right")
  save(figure, "clipping_cpu.svg")


def contrastive(report, field: str, scale: float, label: str) -> None:
  """One field against the number of pairs, for each trained part."""
  names = {
    "t5": "demo T5",
    "head": "projection head, frozen T5",
    "net": "embedding net, dim 8",
  }
  figure, every = plt.subplots(1, len(names), figsize=(9, 3), sharex=True)
  for axes, (name, title) in zip(every, names.items(), strict=True):
    cases = [c for c in report["cases"] if c["case"] == name]
    for way, (color, marker, _) in CONTRASTIVE.items():
      points = [
        (c["size"], c["ways"][way][field] / scale)
        for c in cases
        if field in c["ways"].get(way, {})
      ]
      if points:
        axes.plot(
          *zip(*points, strict=True), color=color, marker=marker, markersize=4
        )
    sizes = sorted({c["size"] for c in report["cases"]})
    if field == "temporaries" and cases:
      whole = [4 * n * n * cases[0]["parameters"] / scale for n in sizes]
      axes.plot(sizes, whole, color="gray", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="pairs, n", ylabel=label)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
  handles = [
    plt.Line2D([], [], color=color, marker=marker, markersize=4, label=text)
    for color, marker, text in CONTRASTIVE.values()
  ]
  if field == "temporaries":
    text = "n\u00b2 gradients of full size"
    handles.append(plt.Line2D([], [], color="gray", ls=":", label=text))
  name = "memory" if field == "temporaries" else "time"
  save(figure, f"contrastive_{name}.svg", columns=5, room=0.14, handles=handles)


def detectors(found) -> None:
  """Precision against recall of what finds near-duplicates."""
  figure, every = plt.subplots(1, 2, figsize=(7.5, 3), sharey=True)
  sides = {"variant": "a variant of the topic", "title": "its title"}
  for axes, (side, title) in zip(every, sides.items(), strict=True):
    for row in found["detectors"]:
      if row["compared with"] == side:
        color, style = DETECTORS[row["detector"]]
        points = row["curve"][-1:] if style == "o" else row["curve"]
        _, precision, recall = zip(*points, strict=True)
        axes.plot(recall, precision, style, color=color, label=row["detector"])
    axes.axhline(0.9, color="gray", linestyle="--", linewidth=0.8)
    share = found["near-duplicates"] / found["pairs"]
    axes.axhline(share, color="gray", linestyle=":", linewidth=0.8)
    axes.set(xlabel="recall", xlim=(0, 1.02), ylim=(0.84, 1.005))
    axes.set_title(f"query beside {title}", fontsize=9)
  every[0].set_ylabel("precision")
  save(figure, "leakage_detectors.svg", every[0], room=0.14)


def main() -> None:
  with matplotlib.rc_context(SETTINGS):
    bars, grown = (
      load("2026-11-21_clipping.json"),
      load("2026-11-21_clipping_growth.json"),
    )
    growth(bars["cases"] + grown["cases"])
    detectors(load("2026-11-22_leakage_detectors.json"))
    coupled = load("2026-11-21_contrastive.json")
    contrastive(coupled, "cpu_s", 1.0, "CPU seconds")
    contrastive(coupled, "temporaries", 2**20, "temporaries, MiB")


if __name__ == "__main__":
  main()
