"""``python -m kvcompress``: the command line."""

from __future__ import annotations

from kvcompress.cli import main

if __name__ == "__main__":
    main()
