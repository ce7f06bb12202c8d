"""The command `deltaic`, also as `python -m deltaic`."""

import os
import signal


def main() -> None:
    """Run the command line. A Ctrl-C while it is loaded ends the process, with the exit code of later ones."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # Not by an exception: in the midst of an import it becomes an ImportError, or is lost.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from deltaic import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
