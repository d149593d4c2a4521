"""Laws of the page: complete, self-contained, of bounded size, and safe for any recording."""

import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.verdict.page import COLUMNS, ROWS, WIDTH, agreement_map, chart, page, ticks
from torchrepro.verdict.value import (
    Advice,
    Cell,
    Compared,
    Distance,
    Edit,
    Element,
    Kind,
    Program,
    RunFacts,
    Setting,
    Verdict,
)

from .browser import PROGRAM, Tab, tab
from .verdicts import MODULES, agreement, divergence, equal, losses, side, unequal

HOSTILE = (
    "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)><!-- {{ 7*7 }} \x1b[2J\u202e"
)
ENDLESS = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """A page's elements, its texts, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.in_order: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.in_order.append((tag, f"#{dict(attrs)['id']}"))
        if tag == "details":
            self.in_order.append((tag, "(folded)"))
        if tag not in ENDLESS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content, as in SVG."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that the element that is open is the one that is closed."""
        assert self.open.pop() == tag
        if tag == "details":
            self.in_order.append((tag, "(ends)"))

    def handle_data(self, data: str) -> None:
        """Note a text by the element that it is in."""
        tag = self.open[-1] if self.open else ""
        self.texts.setdefault(tag, []).append(data)
        self.in_order.append((tag, data))

    @property
    def shape(self) -> list[str]:
        """The elements in their order, which no data may change."""
        return [tag for tag, _ in self.tags]


def sections(text: str) -> list[str | None]:
    """Return the names of the sections of a page."""
    return [attributes.get("id") for tag, attributes in Reader(text).tags if tag == "section"]


def filled(text: str) -> Verdict:
    """Return a verdict with `text` in every field that a recording controls."""
    place = divergence(
        *(text, Kind.OUTPUTS),
        phase=text,
        module=text,
        source=text,
        thread=text,
        what=text,
        left=side(run=text, outputs=text, argument=text, input_fingerprints=(text,)),
        right=side(outputs=text + "1", argument=text + "1", output_fingerprints=(text,)),
        elements=(Element(text, (1,), text, text),),
        distances=(Distance(text, 1.0, 1.0, 1.0),),
        called=text,
    )
    return unequal(
        place,
        left=text,
        right=text,
        by_module=((text, 1),),
        map=(Cell(7, text, 1, 1), Cell(8, text, 1, 0)),
        settings=(Setting(text, text, text),),
        across_ranks=(text,),
        notes=(text,),
        advice=Advice(text, Edit(text, text, text), text, text, text, cause_id=text),
        program=Program(models=((text, text),)),
        about=(RunFacts(text, text, text, text, text),) * 2,
    )


def huge(steps: int = 1000, modules: int = 200) -> Verdict:
    """Return a verdict with many steps and modules, and a hundred times as many losses."""
    names = tuple(f"encoder.layers.{n // 5}.part{n % 5}.proj" for n in range(modules))
    return unequal(
        divergence(step=400, module=names[20]),
        map=agreement(names, steps, 400, modules // 10),
        by_module=tuple((name, 1) for name in names),
        losses=losses(100 * steps, 400),
    )


ENDED = divergence("", Kind.ENDED, left=None, right=None)
LONGER = tuple((at, 1.0, None if at > 2 else 1.0) for at in range(9))
PAGES = {
    "two runs that diverge": unequal(),
    "two equal runs": equal(),
    "no map and no losses of equal runs": equal(map=(), losses=()),
    "a run that ended earlier": unequal(ENDED, losses=LONGER, map=(), advice=None),
    "losses of which one run has fewer": unequal(losses=LONGER),
    "losses that drift apart": unequal(
        losses=tuple((at, 1.0, 1.0 + at * (at > 2)) for at in range(9))
    ),
}


def read(verdict: Verdict) -> str:
    """Return the texts of a page in order, each after its element."""
    found = Reader(page(verdict))
    assert found.open == []
    return "\n".join(
        f"{tag}: {' '.join(text.split())}"
        for tag, text in found.in_order
        if text.strip() and tag not in ("style", "script")
    )


def test_a_page_has_the_content_of_the_terminal(golden: Any) -> None:
    """Each fact is shown once, values rather than fingerprints; missing facts take no space."""
    golden("page.txt", {name: read(verdict) for name, verdict in PAGES.items()})


@given(text=st.text(min_size=1) | st.just(HOSTILE))
def test_no_text_of_a_recording_becomes_markup(text: str) -> None:
    """Whatever the names of modules, lines or settings, the elements of the page are the same."""
    plain, found = Reader(page(filled("plain"))), Reader(page(filled(text)))

    assert found.shape == plain.shape
    assert found.open == []
    assert {name for _, every in found.tags for name in every} == {
        name for _, every in plain.tags for name in every
    }


def test_hostile_names_are_shown_literally() -> None:
    """A name with a script is shown as text; marks of text direction are escaped visibly."""
    text = page(filled(HOSTILE))
    shown = " ".join(part for parts in Reader(text).texts.values() for part in parts)

    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "</script><script>alert(1)</script>" in shown
    assert "{{ 7*7 }}" in shown


def test_a_page_loads_nothing_and_runs_only_its_own_script() -> None:
    """No reference to another file; the policy allows exactly the inline style and script."""
    text = page(unequal())
    found = Reader(text)

    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
    every_attribute = [pair for _, every in found.tags for pair in every.items()]
    links = [value for name, value in every_attribute if name in ("src", "href")]
    assert links == ["data:,"]
    policy = next(every["content"] or "" for _, every in found.tags if "http-equiv" in every)
    for kind, code in (("style", found.texts["style"][0]), ("script", found.texts["script"][-1])):
        digest = b64encode(sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not any("style" in every for _, every in found.tags)


def test_a_thousand_steps_of_two_hundred_modules_stay_a_small_page() -> None:
    """Neighbouring steps and sibling modules are merged; the page is created within a second."""
    verdict = huge()
    begun = time.process_time()
    text = page(verdict)
    seconds = time.process_time() - begun
    print(f"{len(verdict.map):,} cells, {len(verdict.losses):,} losses: {len(text):,} characters")
    print(f"{seconds:.2f} s of a processor")

    assert seconds < 2
    assert len(text) < 400_000
    found = agreement_map(verdict.map, verdict.first)
    assert len(found.columns) <= COLUMNS
    assert len(found.rows) <= ROWS
    assert found.marked is not None
    first, last = found.columns[found.marked[0]]
    assert first <= 400 <= last
    assert found.rows[found.marked[1]] == "encoder.layers.4.*"


names = st.lists(st.text("ab.", min_size=1, max_size=9), min_size=1, max_size=150, unique=True)


@given(modules=names, steps=st.integers(1, 700), data=st.data())
def test_the_map_counts_every_record_once(
    modules: list[str], steps: int, data: st.DataObject
) -> None:
    """However cells are drawn together, the sums stay those of the verdict, and the map small."""
    some = st.tuples(st.integers(0, steps), st.sampled_from(modules), *[st.integers(0, 9)] * 2)
    cells = [Cell(*row) for row in data.draw(st.lists(some, min_size=1, max_size=60))]
    cells += [Cell(step, modules[step % len(modules)], 1, 0) for step in range(steps)]

    found = agreement_map(cells)

    assert len(found.columns) <= COLUMNS
    assert len(found.rows) <= ROWS
    flat = found.flat_counts()
    assert sum(flat[::2]) == sum(cell.same for cell in cells)
    assert sum(flat[1::2]) == sum(cell.differing for cell in cells)
    paths = [path for row in found.outlines() for _, path in row]
    drawn = sum(int(n) for path in paths for n in re.findall(r"h(\d+)", path))
    assert drawn == sum(same + differing > 0 for row in found.counts for same, differing in row)


@given(
    st.lists(st.none() | st.floats(), max_size=30),
    st.lists(st.none() | st.floats(), max_size=30),
)
def test_a_chart_draws_what_is_finite_and_nothing_else(
    left: list[float | None], right: list[float | None]
) -> None:
    """Whatever the losses are, every coordinate is a number; none are drawn where none are."""
    curves = [[(float(at), loss) for at, loss in enumerate(each)] for each in (left, right)]
    finite = [y for y in (*left, *right) if y is not None and abs(y) < 1e300]

    found = chart(curves, 100)

    assert (found is None) == (not finite)
    if found:
        joined = "".join(found.paths)
        assert re.fullmatch(r"([ML]-?[\d.]+,-?[\d.]+(h0)?)*", joined)
        assert len(re.findall(r"[ML]", joined)) == len(finite)


def test_a_long_curve_is_thinned_and_keeps_its_highest_and_lowest_point() -> None:
    """A single outlier among a million steps stays visible."""
    curve = [(float(at), 9.0 if at == 123_457 else 1.0 + at % 3) for at in range(300_000)]

    found = chart([curve], 100)

    assert found is not None
    points = re.findall(r"[ML]([\d.]+),([\d.]+)", found.paths[0])
    assert len(points) <= 800
    highest = min(points, key=lambda point: float(point[1]))
    assert float(highest[0]) == pytest.approx(WIDTH * 123_457 / 299_999, abs=1)


@given(low=st.floats(-1e9, 1e9), room=st.floats(1e-3, 1e9))
def test_ticks_are_round_and_within_the_range(low: float, room: float) -> None:
    """An axis has two to six marks, none outside its range."""
    found = ticks(low, low + room)

    assert 1 <= len(found) <= 6
    assert all(low - room / 1e6 <= at <= low + room * (1 + 1e-6) for at, _ in found)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Return the page of a real browser."""
    if not PROGRAM:
        pytest.skip("no Chromium or Chrome is installed")
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


Show = Callable[[Verdict], Path]


@pytest.fixture
def show(browser: Tab, tmp_path: Path) -> Show:
    """Return a function that opens the page of a verdict in the browser and returns its file."""

    def show(verdict: Verdict) -> Path:
        file = tmp_path / "page.html"
        file.write_text(page(verdict), encoding="utf-8")
        browser.complaints.clear()
        browser.requests.clear()
        browser.open(file)
        return file

    return show


VERDICTS: dict[str, Callable[[], Verdict]] = {
    "unequal": unequal,
    "equal": equal,
    "hostile": partial(filled, HOSTILE),
    "huge": huge,
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_browser_reports_no_problem(browser: Tab, show: Show, kind: str) -> None:
    """No error, no warning, no alert, and no request except for the file itself."""
    file = show(VERDICTS[kind]())

    here = browser.value("[...document.querySelectorAll('section')].map(each => each.id)")
    assert here == sections(file.read_text(encoding="utf-8"))
    assert browser.value("document.querySelectorAll('h1').length") == 1
    assert browser.complaints == []
    assert [url for url in browser.requests if url != "data:,"] == [file.as_uri()]


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_a_page_fits_a_window_of_any_width(browser: Tab, show: Show, width: int) -> None:
    """Nothing overflows horizontally, on a phone or on a wide screen."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.ask("Emulation.setDeviceMetricsOverride", **size)
    for verdict in (unequal(), huge(50), filled("long" * 60)):
        show(verdict)

        assert browser.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_schemes(browser: Tab, show: Show, scheme: str) -> None:
    """Every text has a contrast of at least 4.5 to its background (WCAG 2, level AA)."""
    emulate(browser, scheme)
    show(unequal())

    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light")
    assert browser.value(CONTRASTS) == []


def said(browser: Tab, section: str) -> str:
    """Return the announced text of a section."""
    return str(browser.value(f"document.querySelector('#{section} .said').textContent"))


def test_the_losses_are_read_with_the_keyboard_and_the_pointer(browser: Tab, show: Show) -> None:
    """The chart begins at the first divergence; arrow keys and the pointer read each step."""
    show(unequal())

    browser.value("document.querySelector('.plot').focus()")
    assert said(browser, "losses").startswith("step 7: A and B 1.858")
    browser.press("ArrowRight")
    assert re.fullmatch(r"step 8: A 1\.80\d+, B 1\.82\d+, B - A 0\.02", said(browser, "losses"))
    browser.press("Home")
    assert said(browser, "losses") == "step 0: A and B 2.3"
    browser.value("document.querySelector('.chart').scrollIntoView()")
    box = browser.value("document.querySelector('.chart').getBoundingClientRect().toJSON()")
    x, y = box["right"] - 2, box["top"] + 50
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert said(browser, "losses").startswith("step 11: A ")


def test_modules_are_filtered_by_name(browser: Tab, show: Show) -> None:
    """The filter hides all other modules: in the map, in the table, and for the arrow keys."""
    show(unequal())
    every = "[...document.querySelectorAll('[data-module]:not([hidden])')]"
    visible = f"{every}.map(e => e.dataset.module)"

    browser.value("document.querySelector('.filter input').focus()")
    browser.ask("Input.insertText", text="MLP")

    layers = [f"layers.{n}.mlp" for n in range(4)]
    assert browser.value(visible) == [*layers, "layers.2.mlp"]
    assert browser.value("document.querySelector('output').textContent") == "4 of 10 modules"
    browser.value("document.querySelector('.map').focus()")
    browser.press("ArrowDown")
    assert "layers.3.mlp" in said(browser, "map")


NOTICE = """new Promise(done => {
  const ends = Date.now() + 60000;
  const look = () => {
    const said = document.getElementById("notice").textContent;
    if (said || Date.now() > ends) done([said, String(getSelection())]);
    else setTimeout(look, 20);
  };
  look();
})"""


def test_commands_are_copied(browser: Tab, show: Show) -> None:
    """A copy button copies the text before it, or selects it, and reports which."""
    show(unequal())
    browser.value("window.scrollTo(0, 0); document.querySelector('#advice .copy').focus()")
    browser.press("Enter")
    notice, selected = browser.value(NOTICE)

    assert notice in ("Copied.", "Selected: copy it with the keyboard.")
    assert notice == "Copied." or selected == "backends.cpu.num_threads=1"


@pytest.mark.parametrize("verdict", [unequal(), equal()], ids=["unequal", "equal"])
def test_a_page_is_accessible_to_a_screen_reader(
    browser: Tab, show: Show, verdict: Verdict
) -> None:
    """Landmarks, one h1, no skipped heading level, and a name for every focusable element."""
    show(verdict)
    nodes = [
        each
        for each in browser.ask("Accessibility.getFullAXTree")["nodes"]
        if not each.get("ignored")
    ]
    roles = [each["role"]["value"] for each in nodes]
    levels = browser.value("[...document.querySelectorAll('h1,h2,h3')].map(e => +e.tagName[1])")

    assert (roles.count("banner"), roles.count("main")) == (1, 1)
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert levels.count(1) == 1
    for each in nodes:
        focusable = any(its["name"] == "focusable" for its in each.get("properties", []))
        if focusable and each["role"]["value"] != "RootWebArea":
            assert each.get("name", {}).get("value"), each
    assert browser.value("[...document.querySelectorAll('th:not([scope])')].length") == 0
    assert browser.value("[...document.querySelectorAll('[tabindex]')].every(e => !e.tabIndex)")


def test_tab_moves_through_a_page_from_top_to_end(browser: Tab, show: Show) -> None:
    """The focus follows the order of the page, is never trapped, and is always visible."""
    show(unequal())
    places = []
    for _ in range(60):
        browser.press("Tab")
        place = browser.value(
            "[...document.querySelectorAll('body *')].indexOf(document.activeElement)"
        )
        if place < 0:  # the body itself: the end is reached
            break
        outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        places.append(place)

    assert places == sorted(set(places))
    names = browser.value(f"{places}.map(n => document.querySelectorAll('body *')[n].className)")
    assert {"map", "plot", "copy"} <= set(names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_cell_with_more_differences_stands_out_more(
    browser: Tab, show: Show, scheme: str
) -> None:
    """In both schemes, each shade has more contrast to the background than the one before."""
    emulate(browser, scheme)
    show(unequal())
    style = "getComputedStyle(document.querySelector('{}')).{}"
    colors = [browser.value(style.format("section", "backgroundColor"))]
    colors += [browser.value(style.format(f".legend .shade{n}", "fill")) for n in range(5)]
    rgb = [[int(part) for part in re.findall(r"\d+", color)] for color in colors]

    distances = [sum(abs(a - b) for a, b in zip(rgb[0], each, strict=True)) for each in rgb]
    saturations = [1 - min(each) / max(each) for each in rgb[1:]]
    assert distances == sorted(distances)
    assert saturations == sorted(saturations)


def emulate(browser: Tab, scheme: str) -> None:
    """Show pages in the preferred colour scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.ask("Emulation.setEmulatedMedia", features=features)


def test_the_map_is_read_with_the_keyboard(browser: Tab, show: Show) -> None:
    """Tab reaches the map at the first divergence; arrow keys move, and each cell is announced."""
    verdict = unequal()
    verdict = replace(verdict, map=(*verdict.map, Cell(12, MODULES[0], 0, 3)))
    show(verdict)

    def read() -> str:
        return said(browser, "map")

    browser.value("document.querySelector('.map').focus()")
    assert read() == "step 7, layers.2.mlp: 8 of 20 records differ"
    browser.press("ArrowLeft")
    assert read() == "step 6, layers.2.mlp: all 20 records are the same"
    for key in ("Home", "PageUp"):
        browser.press(key)
    assert read().startswith(f"step 0, {MODULES[0]}:")
    browser.press("ArrowUp")  # no further than the border
    assert read().startswith(f"step 0, {MODULES[0]}:")
    browser.press("End")
    assert read() == f"step 12, {MODULES[0]}: 3 of 3 records differ"
    browser.press("PageDown")
    assert read() == f"step 12, {MODULES[-1]}: no records"


def test_a_page_can_be_printed(browser: Tab, show: Show) -> None:
    """The paper is white even in the dark scheme."""
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.ask("Emulation.setEmulatedMedia", media="print", features=dark)
    show(unequal())

    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value(CONTRASTS) == []
    browser.ask("Emulation.setEmulatedMedia", media="", features=[])


CONTRASTS = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parts(getComputedStyle(at).backgroundColor);
      if (color.length === 3) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!text || node.closest("script, style")) continue;
    const style = getComputedStyle(node);
    const ink = light(parts(node.closest("svg") ? style.fill : style.color));
    const paper = light(behind(node));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) poor.push([node.tagName, node.textContent.trim(), contrast]);
  }
  return poor;
})()"""


@pytest.mark.parametrize("steps", [0, 12])
def test_records_after_the_last_step_are_labelled_on_the_page(steps: int) -> None:
    """Their column of the map, and a divergence in it, are not labelled as a step."""
    first = divergence(step=steps, after_last=True)
    compared = Compared(1, steps, 100, 100, "op", after_last=True)
    text = page(unequal(first, compared=compared, map=agreement(MODULES, steps + 1, steps, 5)))
    name = "after the last step" if steps else "outside of any step"

    assert f"<dd>{name}</dd>" in text
    assert f"<span>{name}</span>" in text
    assert f"step {steps}<" not in text
