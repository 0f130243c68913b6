"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start.

    Whoever is started in the background is told to ignore it, and would pass that on to them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
