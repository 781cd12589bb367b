"""`python -m dspark_cli`."""

from . import main

main()
