"""The installed command, and python -m layernorm_cli."""

import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line; a signal during its first imports ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
