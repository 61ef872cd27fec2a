"""Certifying from Python: one call, or one test a check."""

import inspect
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from muonsplit.certificate.run import Certificate, Profile, Question, asked_ways
from muonsplit.certificate.run import certify as run
from muonsplit.certificate.verdict import CheckResult, Verdict, labelled
from muonsplit.checks import CHECKS
from muonsplit.checks.registry import check_named
from muonsplit.errors import UsageError
from muonsplit.subjects.connect import connect
from muonsplit.subjects.process import InProcess, Worker
from muonsplit.subjects.ranks import Ranks, driver_for

Subject = str | Callable[..., Any]


class NonconformanceError(AssertionError):
    """A subject does not conform, or could not be judged.

    Args:
        certificate: What was found.
        message: One line a check that did not pass as expected.
    """

    def __init__(self, certificate: Certificate, message: str) -> None:
        super().__init__(message)
        self.certificate = certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is asked, and of whom; certified once, when it is first needed.

    Attributes:
        subject: A connection string, or a factory declared with :func:`muonsplit.subject`.
        models: Models to certify on; by default those the subject declares.
        dialect: Dialect to hold it to; by default its own, asked per head.
        profile: How much is asked.
        seed: Root of every random draw.
        only: Ids of the checks to run; all by default.
        timeout: Seconds one run may take.
        memory: GiB the subject's process may take beyond what it starts with.
        world_size: Ranks that it runs on, a power of two.
        ways: Ways of sharding a model among them; by default those the subject declares.
        in_process: Whether it runs in this process, to be debugged.
        expected_failures: Reason by the id of each check that is known not to pass.
    """

    subject: Subject
    models: Sequence[str] = ()
    dialect: str | None = None
    profile: Profile = "ci"
    seed: int = 0
    only: Sequence[str] = ()
    timeout: float = 60.0
    memory: float = 8.0
    world_size: int = 1
    ways: Sequence[str] = ()
    in_process: bool = False
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    _made: list[Certificate] = field(default_factory=list)

    def __post_init__(self) -> None:
        for id in self.expected_failures:
            check_named(id)

    @property
    def spec(self) -> str:
        """The connection string."""
        return self.subject if isinstance(self.subject, str) else spec_of(self.subject)

    @property
    def certificate(self) -> Certificate:
        """What was found."""
        if not self._made:
            question = Question(
                models=self.models,
                dialect=self.dialect,
                profile=self.profile,
                seed=self.seed,
                ways=self.ways,
                only=self.only,
            )
            with _one_thread(), self._driver() as driver:
                self._made.append(run(driver, question))
        return self._made[0]

    @property
    def done(self) -> bool:
        """Whether it has been certified."""
        return bool(self._made)

    def _driver(self) -> InProcess | Worker | Ranks:
        return driver_for(
            self.spec,
            self.world_size,
            timeout=self.timeout,
            memory=self.memory,
            in_process=self.in_process,
        )

    def result(self, model: str, check: str) -> CheckResult:
        """What one check came to on one model, by its label."""
        found = next(m for m in self.certificate.models if m.label == model)
        return next(r for r in found.results if r.check == check)

    def asked(self) -> list[tuple[str, str]]:
        """The models and checks that are asked for, without running anything.

        Raises:
            SubjectError: If the subject cannot be found.
        """
        info = connect(self.spec, Path.cwd()).info
        models = self.models or info.models
        if self.profile == "smoke":
            models = models[:1]
        ids = [id for id in CHECKS if not self.only or id in self.only]
        ways = asked_ways(self.ways, info.ways, self.world_size)
        labels = [labelled(model, way) for model in dict.fromkeys(models) for way in ways]
        return [(label, id) for label in labels for id in ids]


def certify(
    subject: Subject,
    *,
    on_fail: Literal["raise", "return"] = "raise",
    report: Path | str | None = None,
    **asked: Any,
) -> Certificate:
    """Certifies an optimizer.

    Args:
        subject: A connection string (``torch``, ``deepspeed:stage=1``, ``package.module:factory``),
            or a factory declared with :func:`muonsplit.subject`.
        on_fail: Whether a subject that does not conform raises, or the certificate is returned.
        report: Folder to write the certificate and all reports to.
        **asked: Fields of :class:`Session`: ``models``, ``dialect``, ``profile``, ``seed``,
            ``only``, ``timeout``, ``memory``, ``world_size``, ``ways``, ``in_process``,
            ``expected_failures``.

    Returns:
        The certificate. Expected failures do not change its verdict.

    Raises:
        NonconformanceError: If a check did not pass that was not expected to fail.
        UsageError: If something that was expected to fail passes, or is no check.
        MuonsplitError: If the question itself is wrong.
    """
    session = Session(subject=subject, **asked)
    certificate = session.certificate
    if report is not None:
        write(certificate, Path(report))
    _refuse_passing(certificate, session.expected_failures)
    problems = [
        told(r, model.label)
        for model in certificate.models
        for r in model.results
        if r.status in ("failed", "undecided") and r.check not in session.expected_failures
    ]
    if not problems and certificate.verdict is Verdict.INCONCLUSIVE and not session.only:
        excused = {r.check for m in certificate.models for r in m.results if r.status != "passed"}
        problems = [] if excused & set(session.expected_failures) else ["nothing was judged"]
    if problems and on_fail == "raise":
        raise NonconformanceError(certificate, "\n".join(problems))
    return certificate


def write(certificate: Certificate, folder: Path) -> None:
    """Writes the certificate and every report to a folder."""
    from muonsplit.certificate import statement
    from muonsplit.report.files import write_reports

    statement.write(certificate, folder)
    write_reports(certificate, folder)


def told(result: CheckResult, model: str) -> str:
    """What a check came to, for the reader of a failed test."""
    if result.findings:
        first = result.findings[0]
        where = f" {first.weight}" if first.weight else ""
        more = f" (and {len(result.findings) - 1} more)" if len(result.findings) > 1 else ""
        return f"{model}: {result.check}:{where} {first.message}{more}"
    return f"{model}: {result.check} is {result.status}: {result.reason}"


def _refuse_passing(certificate: Certificate, expected: Mapping[str, str]) -> None:
    for id, reason in expected.items():
        statuses = {r.status for m in certificate.models for r in m.results if r.check == id}
        if statuses and not statuses & {"failed", "undecided"}:
            raise UsageError(
                f"{id} was expected to fail ({reason}), and is {', '.join(sorted(statuses))}.",
                "Take it off expected_failures.",
            )


def spec_of(factory: Callable[..., Any]) -> str:
    """The connection string of a factory at the top level of a file.

    Raises:
        UsageError: If it is defined elsewhere: the subject's own process could not find it.
    """
    path, name = inspect.getsourcefile(inspect.unwrap(factory)), factory.__qualname__
    if path is None or not name.isidentifier():
        raise UsageError(
            f"The factory {name} is not at the top level of a file.",
            "The subject runs in a process of its own, which has to find it there.",
        )
    return f"file:{os.path.abspath(path)}:{name}"


@contextmanager
def _one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
