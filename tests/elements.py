"""What a page of HTML consists of."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The elements of a page, all closed, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
