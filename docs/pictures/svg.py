"""A small SVG writer: text stays text, coordinates have one decimal, and the same calls give the same bytes.

Readable on light and on dark pages: a viewer that knows prefers-color-scheme gets a page colour and text to match, any
other one no page and greys that both can bear. The colours below stand out on both.
"""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

WIDTH = 720
BLUE, ORANGE, RED, TEAL, VIOLET, GREY = "#3b82f6", "#e8590c", "#e5383b", "#0f9f87", "#8b5cf6", "#8b949e"
RAMP = ("#1971c2", "#4c6ef5", "#7950f2", "#ae3ec9", "#d6336c", "#e8590c")  # white text is readable on each
FONT = "system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif"
STYLE = """
text{fill:#768390}
.title{font-size:18px;font-weight:600}
.strong{font-weight:600}
.small{font-size:12px}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}
.on{fill:#fff;font-weight:600}
.page{fill:none}
@media (prefers-color-scheme:light){.page{fill:#fff}text{fill:#1f2328}.quiet{fill:#59636e}.on{fill:#fff}}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}text{fill:#e6edf3}.quiet{fill:#9aa4af}.on{fill:#fff}}
"""


def attributes(values: dict[str, object]) -> str:
    """ name="value" for each, None left out; stroke_width is stroke-width, class_ is class."""
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(rounded(value))}"'
                   for name, value in values.items() if value is not None)


def rounded(value: object) -> str:
    """A value; floats with one decimal."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


class Svg:
    """A picture, WIDTH px wide, that grows by elements from the back to the front."""

    def __init__(self, height: float, title: str, subtitle: Sequence[str] = ()):
        self.height, self._title, self._elements = height, title, []
        self.text(24, 36, title, "title")
        for number, line in enumerate(subtitle):
            self.text(24, 60 + 19 * number, line, "quiet")

    def element(self, tag: str, text: str | None = None, **values: object) -> None:
        """Any element."""
        end = "/>" if text is None else f">{escape(text)}</{tag}>"
        self._elements.append(f"<{tag}{attributes(values)}{end}")

    def text(self, x: float, y: float, text: str, style: str | None = None, anchor: str | None = None,
             **values: object) -> None:
        """A line of text. anchor: middle or end. style: classes of STYLE."""
        self.element("text", text, x=float(x), y=float(y), class_=style, text_anchor=anchor, **values)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **values: object) -> None:
        """A rectangle with round corners."""
        sides = {"x": float(x), "y": float(y), "width": float(width), "height": float(height), "rx": 3}
        self.element("rect", **(sides | values), fill=fill)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY, **values: object) -> None:
        """A straight line."""
        self.element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=colour, **values)

    def curve(self, points: Iterable[tuple[float, float]], colour: str, **values: object) -> None:
        """Straight lines from point to point."""
        shown = " ".join(f"{rounded(float(x))},{rounded(float(y))}" for x, y in points)
        self.element("polyline", points=shown, fill="none", stroke=colour, stroke_linejoin="round", **values)

    def cross(self, x: float, y: float, size: float = 5) -> None:
        """The mark of a kill."""
        for sign in (1, -1):
            self.line(x - size, y - sign * size, x + size, y + sign * size, RED, stroke_width=3, stroke_linecap="round")

    def __str__(self) -> str:
        height = round(self.height)
        size = attributes({"viewBox": f"0 0 {WIDTH} {height}", "width": WIDTH, "height": height})
        font = attributes({"font_family": FONT, "font_size": 14, "fill": "#768390"})
        page = f'<rect class="page" width="{WIDTH}" height="{height}" fill="none"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img"{size}{font}>\n<title>{escape(self._title)}</title>'
        return "\n".join([head, f"<style>{STYLE}</style>", page, *self._elements, "</svg>\n"])
