"""python -m megaflow: the same as the command megaflow."""

from megaflow.cli import app

app(prog_name="megaflow")
