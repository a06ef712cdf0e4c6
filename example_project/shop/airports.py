"""Reading airport files: which files may be read, and what their rows hold."""

import csv
import hashlib
from contextlib import contextmanager
from importlib import resources
from itertools import islice
from pathlib import Path

from django.conf import settings

from shop.models import Airport

COLUMNS = {
    "icao": "code",
    "iata": "iata",
    "name": "name",
    "city": "city",
    "country": "country",
    "lat": "latitude",
    "lon": "longitude",
}


class BadFileError(Exception):
    """The file cannot be imported, now or later. The message is ours."""


def find_file(source):
    """Give the path of a source: "" is the list in the `airportsdata` package.

    Anything else is the name of a file under SHOP_IMPORT_DIR. A payload is input
    from outside, so a name that leads out of that folder is refused.
    """
    if not source:
        return Path(str(resources.files("airportsdata") / "airports.csv"))
    folder = Path(settings.SHOP_IMPORT_DIR).resolve()
    path = (folder / source).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise BadFileError("There is no such file in the import folder.")
    return path


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_rows(path):
    with _rows(path) as rows:
        return sum(1 for _ in rows)


def read_chunks(path, first_row, size):
    """Yield (number of the first row, list of airports), from `first_row` on."""
    with _rows(path) as rows:
        rows = islice(rows, first_row, None)
        while chunk := list(islice(rows, size)):
            yield first_row, [_airport(row) for row in chunk]
            first_row += len(chunk)


@contextmanager
def _rows(path):
    """Open a CSV file and give its rows as dicts."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if missing := COLUMNS.keys() - set(rows.fieldnames or ()):
                raise BadFileError(f"The file lacks columns: {', '.join(sorted(missing))}.")
            yield rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFileError("The file is not CSV in UTF-8.") from error


def _airport(row):
    values = {field: row[column] or "" for column, field in COLUMNS.items()}
    try:
        values["latitude"] = float(values["latitude"])
        values["longitude"] = float(values["longitude"])
    except (TypeError, ValueError):
        raise BadFileError("A row has no position that is a number.") from None
    if not values["code"]:
        raise BadFileError("A row has no code.")
    return Airport(**values)
