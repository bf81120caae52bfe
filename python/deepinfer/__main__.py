"""``python -m deepinfer``: the same as the ``deepinfer`` command."""

import sys

from deepinfer.cli.app import main

sys.exit(main())
