"""The files of a report, beside the certificate they are made from."""

from pathlib import Path

from muonsplit.certificate.run import Certificate
from muonsplit.files import write_whole
from muonsplit.report import html, junit, markdown


def write_reports(certificate: Certificate, directory: Path) -> list[Path]:
    """Writes ``junit.xml``, ``report.md`` and ``report.html``, each whole or not at all.

    Returns:
        Where they were written.
    """
    made = {
        "junit.xml": junit.render(certificate),
        "report.md": markdown.page(certificate),
        "report.html": html.render(certificate),
    }
    for name, text in made.items():
        write_whole(directory / name, text.encode())
    return [directory / name for name in made]
