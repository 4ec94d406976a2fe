"""``python -m foretoken.bench.lab.peers``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
