"""`python -m flashhopper`. Before it: your shell; after it: cli.py."""

from __future__ import annotations

import sys


def _run() -> int:
    try:
        from .cli import main
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        # The doctor prints whatever is missing, its own dress included.
        from . import doctor

        sys.stdout.write(f"problem {error.name} is not installed: pip install typer rich\n")
        return max(1, doctor.main())
    main()
    return 0


if __name__ == "__main__":
    sys.exit(_run())
