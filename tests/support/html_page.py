"""A page of a report as a reader's program sees it."""

import base64
import csv
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects what a page holds and checks that every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.ids = []
        self.tags = {}
        self.words = ""
        self.script = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.setdefault(tag, []).append(values)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.script += data
        elif not self.open or self.open[-1] != "style":
            self.words += data

    def csv(self, name):
        """Return the rows of a CSV file inside the page."""
        (address,) = {a["href"] for a in self.tags["a"] if a.get("download") == f"{name}.csv"}
        kind, _, content = str(address).partition(",")
        assert kind == "data:text/csv;charset=utf-8;base64"
        return list(csv.DictReader(base64.b64decode(content, validate=True).decode().splitlines()))

    def csv_names(self):
        """Return the names of the CSV files inside the page."""
        names = (str(a.get("download") or "") for a in self.tags.get("a", []))
        return [name.removesuffix(".csv") for name in names if name]
