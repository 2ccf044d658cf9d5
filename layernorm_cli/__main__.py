"""The installed command, and python -m layernorm_cli."""

import gc
import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line; a signal during its first imports ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(100_000)  # what is loaded stays: looking for garbage in it costs a tenth of a start
    from .cli.main import main as run

    try:
        run()
    finally:
        gc.freeze()  # nor does the interpreter look through all of it at the end


if __name__ == "__main__":
    main()
