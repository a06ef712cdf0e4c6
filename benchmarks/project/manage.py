#!/usr/bin/env python
"""Django's command line for one side; DJANGO_SETTINGS_MODULE says which."""

import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
