"""The HTML report in a real browser: everything found can be read, and nothing else happens."""

import html
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from muonsplit.certificate.run import Certificate
from muonsplit.report import matrix
from muonsplit.report.html import render
from muonsplit.report.text import plain
from tests_cpu.certificates import ACTS, conforming, hostile, violating

CHROMIUM = shutil.which("chromium")
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
)
# Replaces the page in a frame by what can be seen of it and by how wide it is.
_MEASURE = """<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe").contentDocument;
  const seen = {
    text: frame.body.innerText,
    title: frame.title,
    background: frame.defaultView.getComputedStyle(frame.body).backgroundColor,
    wide: frame.documentElement.scrollWidth,
    unnamed: [...frame.querySelectorAll("svg:not(:has(title)), table:not(:has(caption))")].length,
  };
  document.title = "";
  document.body.textContent = JSON.stringify(seen);
});
</script>"""

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")


def browse(folder: Path, page: str, *arguments: str) -> tuple[str, list[str]]:
    """What the browser prints of a page, and what it says on its console."""
    assert CHROMIUM is not None
    source = folder / "page.html"
    source.write_text(page)
    command = [CHROMIUM, *_QUIET, f"--user-data-dir={folder / 'profile'}", *arguments]
    done = subprocess.run(
        [*command, source.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def seen(folder: Path, page: str, width: int = 1000, *arguments: str) -> dict[str, Any]:
    """What a reader sees of a page at a width, without the policy that forbids scripts."""
    policy = next(line for line in page.splitlines() if "Content-Security-Policy" in line)
    frame = html.escape(page.replace(policy, ""), quote=True)
    wrapper = f'<body><iframe srcdoc="{frame}" style="width: {width}px; border: 0"></iframe>'
    dumped, _ = browse(folder, f"{wrapper}{_MEASURE}</body>", "--dump-dom", *arguments)
    body = dumped.partition("<body>")[2].rpartition("</body>")[0]
    return json.loads(html.unescape(body))


def words(text: str) -> str:
    return " ".join(text.split())


def expected(certificate: Certificate) -> list[str]:
    """Everything found, undecided and not applied, in words."""
    said: list[str] = []
    for model in certificate.models:
        for result in model.results:
            said += [result.check, result.reason]
            for finding in result.findings:
                said += [finding.message, finding.planned, finding.observed, *finding.numbers]
                said += [f"{float(number):.3g}" for number in finding.numbers.values()]
    return [words(plain(text)) for text in said]


@needs_browser
@pytest.mark.parametrize("made", [conforming, violating])
def test_everything_found_can_be_read(tmp_path: Path, made: Any) -> None:
    found = made()
    page = seen(tmp_path, render(found))
    text = words(page["text"])
    for said in expected(found):
        assert said in text
    assert f"{found.subject} {found.verdict}" in text
    assert page["unnamed"] == 0


@needs_browser
@pytest.mark.parametrize("page", [render(violating()), matrix.page([conforming(), violating()])])
@pytest.mark.parametrize("width", [1000, 400])
def test_nothing_overflows_the_page(tmp_path: Path, page: str, width: int) -> None:
    assert seen(tmp_path, page, width)["wide"] <= width


@needs_browser
def test_a_subject_is_read_and_never_obeyed(tmp_path: Path) -> None:
    page = seen(tmp_path, render(hostile()), 400)
    assert "ran" not in page["title"].split()
    assert page["wide"] <= 400
    text = words(page["text"])
    for act in ACTS:
        assert words(plain(act)) in text
    assert "280000 more characters" in text


@needs_browser
@pytest.mark.parametrize("made", [violating, hostile])
def test_the_console_stays_empty_and_the_page_prints(tmp_path: Path, made: Any) -> None:
    paper = tmp_path / "page.pdf"
    _, console = browse(tmp_path, render(made()), f"--print-to-pdf={paper}")
    assert console == []
    assert paper.read_bytes().startswith(b"%PDF")


@needs_browser
def test_dark_where_the_reader_prefers_dark(tmp_path: Path) -> None:
    page = render(conforming())
    light = seen(tmp_path, page)["background"]
    dark = seen(tmp_path, page, 1000, "--blink-settings=preferredColorScheme=0")["background"]
    brightness = [sum(map(int, said[4:-1].split(","))) for said in (light, dark)]
    assert brightness[0] > 600 > 150 > brightness[1]


@needs_browser
def test_a_script_would_have_been_noticed(tmp_path: Path) -> None:
    page = render(conforming()).replace("<footer>", f"{ACTS[2]}<footer>")
    assert seen(tmp_path, page)["title"] == "ran"
    _, console = browse(tmp_path, page, "--dump-dom")
    assert any("Content Security Policy" in line for line in console)


class _Parts(HTMLParser):
    """The tags, attributes and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str | None] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value for name, value in attrs if name in ("href", "src", "action")}


@pytest.mark.parametrize("page", [render(hostile()), matrix.page([hostile()])])
def test_a_page_needs_nothing_and_runs_nothing(page: str) -> None:
    parts = _Parts()
    parts.feed(page)
    assert parts.tags.isdisjoint({"script", "img", "iframe", "object", "embed", "a", "form"})
    assert not [name for name in parts.attributes if name.startswith("on") or name == "xlink:href"]
    assert parts.addresses == {"data:,"}
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
