"""Reads the HTML of a report."""

import html.parser


class Parser(html.parser.HTMLParser):
  """Checks that tags close in order; gathers headings, texts, tags, links."""

  def __init__(self, text):
    super().__init__()
    self.open, self.headings, self.links = [], [], []
    self.tags, self.texts = set(), []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag != "meta":
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.add(tag)
    self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if self.open[-1:] in (["h2"], ["h3"]):
      self.headings.append(data)
    if data.strip() and "style" not in self.open:
      self.texts.append(data.strip())
