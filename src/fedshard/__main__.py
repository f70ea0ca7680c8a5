"""`python -m fedshard`, and what torchrun starts with `-m fedshard`."""

from fedshard.cli.main import main

if __name__ == "__main__":
    main()
