"""The one error that users see: a sentence that says what was found, expected, and what to do."""


class AttoscopeError(ValueError):
    """Bad input or an unsupported model, in one sentence; the command line exits with 2 on it."""
