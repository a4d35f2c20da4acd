"""The errors a person is meant to read: one sentence, no traceback, an exit code of their own."""


class FreerunError(Exception):
    """Something went wrong that the message explains in full."""

    exit_code = 1


class ConfigError(FreerunError):
    """The configuration asks for something that can't be; found before anything is loaded."""

    exit_code = 2


class DataError(FreerunError):
    """The data named in the configuration is missing, empty or not what its format says."""

    exit_code = 2


class PeerError(FreerunError):
    """Another process of the run died, stalled or disagrees."""

    exit_code = 3


class NonFiniteError(FreerunError):
    """A loss or a gradient is no longer a number."""

    exit_code = 4
