"""Every error a caller can cause, in one hierarchy.

Each message says what was wrong, what was expected and where that comes from, the value, and
what to do. ``exit_code`` is what the command line leaves with; codes follow sysexits.
"""


class MuonsplitError(Exception):
    """Base of all errors raised on purpose by muonsplit.

    Args:
        message: What was wrong, what was expected, and the value.
        hint: What to do about it, or an empty string.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(MuonsplitError):
    """A name, option or argument that does not exist."""

    exit_code = 64


class LayoutError(MuonsplitError, ValueError):
    """A layout that is not one, or that does not fit the weight it is applied to."""

    exit_code = 65


class CutHeadError(LayoutError):
    """A shard boundary that falls inside a block."""


class InputError(MuonsplitError, ValueError):
    """A tensor, dtype or hyperparameter that the orthogonalisation cannot take."""

    exit_code = 65


class ConfigError(MuonsplitError, ValueError):
    """A model config that is missing, unreadable, hostile or unbuildable."""

    exit_code = 65


class NothingRecognisedError(MuonsplitError):
    """A model in which no weight could be split by heads."""

    exit_code = 65


class SubjectError(MuonsplitError):
    """A subject that cannot be found, imported or called at all."""

    exit_code = 64


class RefusedError(SubjectError):
    """A subject that says it cannot be built on this model, layout or option."""


class SubjectFaultError(MuonsplitError):
    """What a subject did while it was driven that no optimizer may do; a finding, not a crash.

    Args:
        message: What happened.
        tail: The last lines the subject's process wrote.
        raised: Whether it raised an exception, and so said itself that something is wrong.
    """

    exit_code = 1

    def __init__(self, message: str, tail: str = "", *, raised: bool = False) -> None:
        super().__init__(message)
        self.tail = tail
        self.raised = raised


class UnobservableError(MuonsplitError):
    """A subject that may be right, but that these observations cannot judge."""

    exit_code = 2


class LackingError(UnobservableError):
    """A subject without something that a check would look at; the check does not apply."""


class GoldenError(MuonsplitError):
    """A golden that is missing, changed, or waiting for review."""

    exit_code = 65


class CertificateError(MuonsplitError):
    """A certificate that is no certificate, or does not say what its own results come to."""

    exit_code = 65


class EvidenceError(MuonsplitError):
    """Checkpoints or a capture that are missing, damaged, unsafe to read, or of different runs."""

    exit_code = 65
