"""Errors a user can cause. Each message is one line: what is wrong, the value, the remedy."""


class JetSpecError(Exception):
    """Base class: the command line prints the message without a traceback and exits with
    `exit_code`.
    """

    exit_code = 1


class ConfigError(JetSpecError):
    """A configuration key or value that cannot be honoured (unknown key, out of range, bad
    combination).
    """

    exit_code = 2


class InputError(JetSpecError):
    """A request that cannot be served (empty prompt, prompt longer than the context,
    max_tokens=0).
    """


class ModelFileError(JetSpecError):
    """A model, draft-head, tokenizer or data file that is missing, damaged or does not fit."""


class KernelError(JetSpecError):
    """An explicitly requested kernel implementation that is not available here."""


class WorkerError(JetSpecError):
    """A process that was started to measure or check ended, hung, or answered nonsense."""


class TokensDiffer(JetSpecError):
    """A configuration under test wrote another token than the reference."""
