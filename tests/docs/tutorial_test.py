#!/usr/bin/env python3
"""Runs every command of docs/tutorial.md and compares what it prints with the page.

    tutorial_test.py [--source DIR] [--build DIR] [--timeout SECONDS]
"""

import sys

import console_test

if __name__ == "__main__":
    sys.exit(console_test.main(["docs/tutorial.md", *sys.argv[1:]]))
