"""The pytest plugin: ``pytest --muonsplit=SUBJECT`` adds a test for each check on each model.

Without the option it does nothing, and imports nothing but pytest.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from muonsplit.api import Session

_SESSIONS = pytest.StashKey["list[Session]"]()
_EXPECTED = "muonsplit_expected_failures"


def parametrize_with_checks(subject: Any, **asked: Any) -> pytest.MarkDecorator:
    """Makes a test function run once for each check on each model.

    The function takes ``check`` and calls it; it raises if the check does not pass.

    Args:
        subject: As for :func:`muonsplit.certify`.
        **asked: Likewise.
    """
    from muonsplit.api import Session

    session = Session(subject=subject, **asked)
    cases = [
        pytest.param(_bound(session, model, id), id=f"{model}-{id}", marks=_marks(session, id))
        for model, id in session.asked()
    ]
    return pytest.mark.parametrize("check", cases)


def _bound(session: "Session", model: str, id: str) -> Callable[[], None]:
    def check() -> None:
        from muonsplit.api import NonconformanceError, told

        result = session.result(model, id)
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status != "passed":
            raise NonconformanceError(session.certificate, told(result, model))

    return check


def _marks(session: "Session", id: str) -> list[pytest.MarkDecorator]:
    expected = session.expected_failures.get(id)
    return [] if expected is None else [pytest.mark.xfail(reason=expected, strict=True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--muonsplit`` and what goes with it."""
    group = parser.getgroup("muonsplit", "certifying optimizers")
    group.addoption("--muonsplit", action="append", metavar="SUBJECT", help="certify this subject")
    group.addoption("--muonsplit-model", action="append", default=[], help="on this model")
    group.addoption("--muonsplit-dialect", help="held to this dialect")
    group.addoption("--muonsplit-profile", default="ci", choices=["smoke", "ci", "thorough"])
    group.addoption("--muonsplit-seed", type=int, default=0)
    group.addoption("--muonsplit-report", type=Path, metavar="DIR", help="write certificates there")
    parser.addini(_EXPECTED, "checks that are known to fail, as ID: REASON", type="linelist")


class _CheckItem(pytest.Item):
    """One check on one model."""

    def __init__(self, *, check: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check = check

    def runtest(self) -> None:
        """Runs it; the first of a subject runs them all."""
        self._check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What the check found, without a traceback of the harness."""
        from muonsplit.errors import MuonsplitError

        if isinstance(excinfo.value, AssertionError | MuonsplitError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it is listed."""
        return self.path, None, self.name


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds the checks of each subject that was named."""
    for made in _sessions(config):
        for model, id in _asked(made):
            name = f"muonsplit[{made.spec}-{model}-{id}]"
            item = _CheckItem.from_parent(session, name=name, check=_bound(made, model, id))
            for mark in _marks(made, id):
                item.add_marker(mark)
            items.append(item)


def _asked(session: "Session") -> list[tuple[str, str]]:
    from muonsplit.errors import MuonsplitError

    try:
        return session.asked()
    except MuonsplitError as error:
        raise pytest.UsageError(str(error)) from None


def _sessions(config: pytest.Config) -> "list[Session]":
    if not config.option.muonsplit:
        return []
    if _SESSIONS not in config.stash:
        from muonsplit.api import Session
        from muonsplit.errors import MuonsplitError

        pairs = (line.partition(":") for line in config.getini(_EXPECTED))
        try:
            expected = {id.strip(): reason.strip() for id, _, reason in pairs}
            config.stash[_SESSIONS] = [
                Session(
                    subject=subject,
                    models=config.option.muonsplit_model,
                    dialect=config.option.muonsplit_dialect,
                    profile=config.option.muonsplit_profile,
                    seed=config.option.muonsplit_seed,
                    expected_failures=expected,
                )
                for subject in config.option.muonsplit
            ]
        except MuonsplitError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_SESSIONS]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Writes the certificate and reports of each subject that was certified."""
    folder = session.config.option.muonsplit_report
    if folder is not None:
        from muonsplit.api import write

        for made in _sessions(session.config):
            if made.done:
                write(
                    made.certificate, folder / "".join(c if c.isalnum() else "-" for c in made.spec)
                )
    return (yield)
