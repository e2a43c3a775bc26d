"""Pages in a real browser: nothing sticks out, and all can be read at night."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from synthq_jax import intervals
from synthq_jax.report import blocks, page, plots

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
  CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)

_PROBE = """
<!DOCTYPE html><body><iframe id="page" style="width: %dpx; height: 800px;
border: 0" srcdoc="%s"></iframe><pre id="found"></pre><script>
function luminance(color) {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(x => {
    x /= 255; return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4; });
  return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
}
function behind(element, view) {
  for (let e = element; e; e = e.parentElement) {
    const color = view.getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color;
  }
}
const frame = document.getElementById("page");
frame.onload = () => {
  const root = frame.contentDocument, view = frame.contentWindow;
  const out = [], faint = [];
  for (const e of root.body.querySelectorAll("*")) {
    const scrolls = e.closest(".scroll, pre");
    const wide = e.clientWidth && e.scrollWidth > e.clientWidth + 1;
    const right = e.getBoundingClientRect().right;
    if (scrolls ? e == scrolls && right > view.innerWidth + 1
                : wide || right > view.innerWidth + 1)
      out.push(e.tagName + " " + e.textContent.trim().slice(0, 40));
    const own = [...e.childNodes].some(
      n => n.nodeType == 3 && n.textContent.trim());
    if (!own || ["STYLE", "style"].includes(e.tagName)) continue;
    const style = view.getComputedStyle(e);
    const color = e.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const pair = [luminance(color), luminance(behind(e, view))].sort();
    const ratio = (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    if (ratio < 4.5)
      faint.push(e.tagName + " " + e.textContent.trim().slice(0, 40));
  }
  const pane = view.getComputedStyle(root.body).backgroundColor;
  document.getElementById("found").textContent = JSON.stringify({
    out, faint, width: root.documentElement.scrollWidth, inner: view.innerWidth,
    cut: [...root.querySelectorAll("figure .scroll")].filter(
      e => e.scrollWidth > e.clientWidth + 1).length,
    is_dark: luminance(pane) < .5, height: root.documentElement.scrollHeight});
};
</script></body>
"""


def looked_at(text: str, width: int, dark: bool, folder: pathlib.Path):
  """Returns what a browser says of a page of that width, by day or night."""
  probe = folder / "probe.html"
  probe.write_text(_PROBE % (width, html.escape(text)))
  command = [
    CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
    f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000",
    f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    "--window-size=1400,900", "--dump-dom", probe.as_uri(),
  ]  # fmt: skip
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=120, check=True
  )
  found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
  return json.loads(html.unescape(found[1]))


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (420, True)])
@pytest.mark.parametrize("name", ["html", "private_html"])
def test_nothing_of_a_report_sticks_out_or_is_faint(
  finished_run, tmp_path, name, width, dark
):
  text = (finished_run.root / getattr(finished_run.report, name)).read_text()
  found = looked_at(text, width, dark, tmp_path)
  assert found["inner"] == width and found["is_dark"] == dark
  assert found["height"] > 2000  # it was really laid out
  assert not found["out"] and found["width"] <= width
  assert not found["faint"]


@needs_browser
def test_what_sticks_out_or_is_faint_is_seen(tmp_path):
  long = blocks.Page(
    title="t", introduction=(blocks.Paragraph(text="x" * 500),)
  )
  text = page.html(long)
  assert not looked_at(text, 420, False, tmp_path)["out"]
  unbroken = text.replace("overflow-wrap: anywhere", "")
  assert looked_at(unbroken, 420, False, tmp_path)["out"]
  grey = text.replace("--ink: #e4e7eb", "--ink: #303030")
  assert looked_at(grey, 420, True, tmp_path)["faint"]


@needs_browser
def test_drawings_scroll_in_themselves_and_have_the_colors_of_the_page(
  tmp_path,
):
  measured = intervals.Interval(mean=0.3, low=0.2, high=0.4)
  svg = plots.in_rows(
    ["a", "b"], {"mean": [measured] * 2}, label="n", lines={"bm25": measured}
  )
  drawn = blocks.Page(
    title="t", introduction=(blocks.Figure(svg=svg, caption="c"),)
  )
  for dark in (False, True):
    found = looked_at(page.html(drawn), 420, dark, tmp_path)
    assert not found["out"] and not found["faint"]
    assert found["width"] <= 420 and not found["cut"]
