"""`python -m headstock`."""

from headstock.cli import main

if __name__ == "__main__":
    main()
