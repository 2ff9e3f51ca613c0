"""`python -m paceline.reward --controller HOST:PORT`."""

from __future__ import annotations

import sys

from paceline.reward.app import main

if __name__ == "__main__":
    sys.exit(main())
