"""The entry point of the `redline` command and of `python -m redline`."""

from __future__ import annotations

import sys

from redline.errors import UsageError, refuse_windows


def main() -> None:
    """Run the command line and end the process."""
    try:
        refuse_windows()
    except UsageError as error:
        sys.stderr.write(f"redline: {error.message()}\n")
        sys.exit(error.exit_code)
    from redline.cli.main import main  # on Windows this import fails

    main()


if __name__ == "__main__":
    main()
