"""`python -m jaxinfer`: the command line."""

from jaxinfer.cli.main import run

if __name__ == "__main__":
    run()
