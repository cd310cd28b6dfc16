"""`python -m headtrain` is `headtrain`."""

import sys

from headtrain.cli import main

sys.exit(main())
