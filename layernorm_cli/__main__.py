"""python -m layernorm_cli"""

from .cli.main import main

main()
